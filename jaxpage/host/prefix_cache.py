"""Which full blocks hold which tokens: the index behind prefix hits, and who goes first.

Knows tokens and block ids, no sequence. A block's content hangs on every token before it, so an
entry is a block's tokens under the entry of the block before. Entries are found by a chained hash
and told apart by comparing: parent by identity, then tokens. A clash costs time, never KV.

    block_size 2           (salt "")                 (salt "x")       roots: spaces never meet
    blocks 3 5 7             |                          |
    a b | c d | e f        3: a b                     4: a b
    a b | c d | g h          |
    tables (3 5 7)         5: c d                     7 and 8 are leaves; 5 goes after both,
    (3 5 8); x: (4)        /      \\                   and 3 after 5
                       7: e f   8: g h

Whoever holds a block holds its ancestors, and lets go of them later or tail first in the same
breath. Idle entries in the order in which they were let go are therefore leaves first, and all
of them can be evicted: the first is the least recently used leaf.
Source of the idea: hashed blocks of vLLM's `KVCacheManager`; the comparison is what it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpage.config import NULL_BLOCK

HashTokens = Callable[[int, tuple[int, ...]], int]
"""(key of the entry before, a block's tokens) -> key. Any function is right, also a constant."""

Space = tuple[tuple[str, str], ...]
"""What keeps prompts apart besides tokens: pairs of kind and value, so that kinds never meet."""


def hash_tokens(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """The default hash of a chain's next block."""
    return hash((parent_key, token_ids))


def salted(salt: str | None) -> Space:
    """The space of requests with this `cache_salt`."""
    return () if salt is None else (("salt", salt),)


@dataclass(slots=True, eq=False)
class CachedBlock:
    """An entry: the tokens of one full block, under the entry of the block before it."""

    block: int
    parent: CachedBlock | Space
    token_ids: tuple[int, ...]
    key: int
    num_children: int = 0
    is_cached: bool = True
    """False once evicted or reset: it is never found again."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that begin a prompt. It takes nothing: open the table before anything else."""

    space: Space = ()
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    last: CachedBlock | None = None
    """The entry of the last block, under which the rest of the prompt will be cached."""


class PrefixCache:
    """Entries by key, and the order in which the idle ones go."""

    def __init__(self, block_size: int, *, hash_tokens: HashTokens = hash_tokens) -> None:
        self.epoch = 0
        """Counts resets: what was filled under an earlier one is not cached any more."""
        self.num_evicted = 0
        self._block_size = block_size
        self._hash_tokens = hash_tokens
        self._by_key: dict[int, list[CachedBlock]] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def match(self, token_ids: Seq[int], space: Space, most_tokens: int) -> PrefixHit:
        """The longest chain of entries that begins these tokens and has at most `most_tokens`."""
        size, hash_block, by_key = self._block_size, self._hash_tokens, self._by_key
        tokens = tuple(token_ids)
        parent: CachedBlock | Space = space
        key, end = hash(space), 0
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
        return PrefixHit(space, tuple(block_ids), end, last)

    def find(self, parent: CachedBlock | Space, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The entry of these tokens under this parent."""
        return _pick(self._by_key.get(self._key(parent, token_ids), ()), parent, token_ids)

    def add(
        self, parent: CachedBlock | Space, token_ids: tuple[int, ...], block: int
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

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def let_go(self, block: int) -> None:
        """Nobody uses a cached block any more: it is the last to be evicted."""
        assert block in self._by_block and block not in self._idle, block
        self._idle[block] = None

    def take_up(self, block: int) -> None:
        """An idle block is in use again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forgets the least recently used leaf and returns its block. There must be an idle one."""
        block, _ = self._idle.popitem(last=False)
        entry = self._by_block.pop(block)
        assert not entry.num_children, f"block {block} has {entry.num_children} children"
        entry.is_cached = False
        self.num_evicted += 1
        entries = self._by_key[entry.key]
        entries.remove(entry)
        if not entries:
            del self._by_key[entry.key]
        if isinstance(entry.parent, CachedBlock):
            entry.parent.num_children -= 1
        return block

    def reset(self) -> tuple[int, ...]:
        """Forgets everything; returns the blocks that were idle, tails first."""
        blocks = tuple(self._idle)
        for entry in self._by_block.values():
            entry.is_cached = False
        self._by_key.clear()
        self._by_block.clear()
        self._idle.clear()
        self.epoch += 1
        return blocks

    def check_integrity(self) -> None:
        """Index, blocks and chains agree, and every idle block comes after its descendants."""
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
                assert self._by_block.get(parent.block) is parent, f"{block} hangs on nothing"
                assert block in self._idle or parent.block not in self._idle, (block, parent.block)
                num_children[parent.block] += 1
            content = (parent.block if isinstance(parent, CachedBlock) else parent, entry.token_ids)
            assert content not in contents, f"cached twice: {content}"
            contents.add(content)
        for block, count in num_children.items():
            assert self._by_block[block].num_children == count, (block, count)
        self._check_order()

    def _check_order(self) -> None:
        gone: set[int] = set()
        for block in self._idle:
            parent = self._by_block[block].parent
            assert not isinstance(parent, CachedBlock) or parent.block not in gone, block
            gone.add(block)

    def _key(self, parent: CachedBlock | Space, token_ids: tuple[int, ...]) -> int:
        parent_key = parent.key if isinstance(parent, CachedBlock) else hash(parent)
        return self._hash_tokens(parent_key, token_ids)


def _pick(
    entries: Seq[CachedBlock], parent: CachedBlock | Space, token_ids: tuple[int, ...]
) -> CachedBlock | None:
    """The entry that is really of these tokens under this parent; spaces compare by value."""
    for entry in entries:
        same_parent = entry.parent is parent or (
            not isinstance(parent, CachedBlock) and entry.parent == parent
        )
        if same_parent and entry.token_ids == token_ids:
            return entry
    return None
