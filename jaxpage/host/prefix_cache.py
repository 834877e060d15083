"""Which full blocks hold which tokens: the index behind prefix hits, and the order of eviction.

Knows tokens and block ids, no sequence. A block's K and V depend on every token before it, so an
entry is a block's tokens under the entry of the block before. Entries are found by a chained hash
and told apart by comparing: parent by identity, then tokens. A clash of hashes costs time only.

    block_size 2           (no salt)                 (salt "x")       a root is a namespace
    blocks 3 5 7             |                          |
    a b | c d | e f        3: a b                     4: a b
    a b | c d | g h          |
    tables (3 5 7)         5: c d                     7 and 8 are leaves; 5 goes after both,
    (3 5 8); x: (4)        /      \\                   and 3 after 5
                       7: e f   8: g h

An entry is evictable while its block is in no table. A table that has a block has its ancestors
too, and gives blocks back tail first, so in the order in which entries became evictable leaves
come first: the first one is the least recently used leaf.
Source of the idea: hashed blocks of vLLM's `KVCacheManager`, which does not compare tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpage.config import NULL_BLOCK
from jaxpage.host.plan import Namespace

HashTokens = Callable[[int, tuple[int, ...]], int]
"""(key of the entry before, a block's tokens) -> key. Any function is right, even a constant."""


def hash_tokens(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """The default hash of a chain's next block."""
    return hash((parent_key, token_ids))


@dataclass(slots=True, eq=False)
class CachedBlock:
    """An entry: the tokens of one full block, under the entry of the block before it."""

    block: int
    parent: CachedBlock | Namespace
    token_ids: tuple[int, ...]
    key: int
    num_children: int = 0
    is_cached: bool = True
    """False once evicted or reset: it is never found again."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that begin a prompt. It takes no block: good until one is next taken."""

    namespace: Namespace = ()
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    last: CachedBlock | None = None
    """The entry of the last block, under which the rest of the prompt will be cached."""


class PrefixCache:
    """Entries by key, and the order in which they are evicted."""

    def __init__(self, block_size: int, *, hash_tokens: HashTokens) -> None:
        self.generation = 0
        """Counts resets: what was filled in an earlier generation is not cached any more."""
        self._block_size = block_size
        self._hash_tokens = hash_tokens
        self._by_key: dict[int, list[CachedBlock]] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, token_ids: Seq[int], namespace: Namespace, most_tokens: int) -> PrefixHit:
        """The longest chain of entries that begins these tokens and has at most `most_tokens`."""
        size, hash_block, by_key = self._block_size, self._hash_tokens, self._by_key
        tokens = tuple(token_ids)
        parent: CachedBlock | Namespace = namespace
        key, end = hash(namespace), 0
        block_ids: list[int] = []
        for start in range(0, min(most_tokens, len(tokens)) - size + 1, size):
            chunk = tokens[start : start + size]
            key = hash_block(key, chunk)
            entry = _pick(by_key.get(key, ()), parent, chunk)
            if entry is None:
                break
            block_ids.append(entry.block)
            parent, end = entry, start + size
        last = parent if isinstance(parent, CachedBlock) else None
        return PrefixHit(namespace, tuple(block_ids), end, last)

    def find(
        self, parent: CachedBlock | Namespace, token_ids: tuple[int, ...]
    ) -> CachedBlock | None:
        """The entry of these tokens under this parent."""
        return _pick(self._by_key.get(self._key(parent, token_ids), ()), parent, token_ids)

    def add(
        self, parent: CachedBlock | Namespace, token_ids: tuple[int, ...], block: int
    ) -> CachedBlock:
        """Enters a block in use. There must be no entry of it, nor one of the same content."""
        assert block not in self._by_block, f"block {block} is cached as something else"
        key = self._key(parent, token_ids)
        entry = CachedBlock(block, parent, token_ids, key)
        entries = self._by_key.setdefault(key, [])
        entries.append(entry)
        self._by_block[block] = entry
        if isinstance(parent, CachedBlock):
            assert parent.is_cached, f"block {block} under the evicted {parent.block}"
            parent.num_children += 1
        return entry

    def entry(self, block: int) -> CachedBlock | None:
        """The entry of a block, None where it is not cached."""
        return self._by_block.get(block)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def mark_evictable(self, block: int) -> None:
        """A cached block is in use no more: it is the last to be evicted."""
        assert block in self._by_block and block not in self._evictable, block
        self._evictable[block] = None

    def touch(self, block: int) -> None:
        """An evictable block is in use again."""
        del self._evictable[block]

    def evict(self) -> int:
        """Forgets the least recently used leaf and returns its block. There must be one."""
        block, _ = self._evictable.popitem(last=False)
        entry = self._by_block.pop(block)
        assert not entry.num_children, f"block {block} has {entry.num_children} children"
        entry.is_cached = False
        entries = self._by_key[entry.key]
        entries.remove(entry)
        if not entries:
            del self._by_key[entry.key]
        if isinstance(entry.parent, CachedBlock):
            entry.parent.num_children -= 1
        return block

    def reset(self) -> tuple[int, ...]:
        """Forgets everything; returns the blocks that were evictable, tails first."""
        blocks = tuple(self._evictable)
        for entry in self._by_block.values():
            entry.is_cached = False
        self._by_key.clear()
        self._by_block.clear()
        self._evictable.clear()
        self.generation += 1
        return blocks

    def check_integrity(self) -> None:
        """Index, blocks and chains agree; each evictable block comes after its descendants."""
        entries = [entry for entries in self._by_key.values() for entry in entries]
        assert all(self._by_key.values()), "a key without an entry"
        assert {id(entry) for entry in entries} == {id(e) for e in self._by_block.values()}
        assert len(entries) == len(self._by_block), "an entry twice"
        num_children: dict[int, int] = dict.fromkeys(self._by_block, 0)
        contents: set[tuple[object, tuple[int, ...]]] = set()
        for block, entry in self._by_block.items():
            assert entry.block == block != NULL_BLOCK and entry.is_cached, entry
            assert len(entry.token_ids) == self._block_size, entry
            assert entry.key == self._key(entry.parent, entry.token_ids), entry
            parent = entry.parent
            if isinstance(parent, CachedBlock):
                assert self._by_block.get(parent.block) is parent, f"the parent of {block} is gone"
                is_after = block in self._evictable or parent.block not in self._evictable
                assert is_after, f"{parent.block} is evictable before its child {block}"
                num_children[parent.block] += 1
            content = (parent.block if isinstance(parent, CachedBlock) else parent, entry.token_ids)
            assert content not in contents, f"cached twice: {content}"
            contents.add(content)
        for block, count in num_children.items():
            assert self._by_block[block].num_children == count, (block, count)
        self._check_order()

    def _check_order(self) -> None:
        gone: set[int] = set()
        for block in self._evictable:
            parent = self._by_block[block].parent
            assert not isinstance(parent, CachedBlock) or parent.block not in gone, block
            gone.add(block)

    def _key(self, parent: CachedBlock | Namespace, token_ids: tuple[int, ...]) -> int:
        parent_key = parent.key if isinstance(parent, CachedBlock) else hash(parent)
        return self._hash_tokens(parent_key, token_ids)


def _pick(
    entries: Seq[CachedBlock], parent: CachedBlock | Namespace, token_ids: tuple[int, ...]
) -> CachedBlock | None:
    """Of entries with one key the one of these tokens under this parent.

    Entries compare by identity, namespaces by value.
    """
    for entry in entries:
        same_parent = entry.parent is parent or (
            not isinstance(parent, CachedBlock) and entry.parent == parent
        )
        if same_parent and entry.token_ids == token_ids:
            return entry
    return None
