"""The device's blocks one by one: free, in tables, waiting for a step, or kept for a prefix hit.

Knows blocks and how many tables each is in, neither which tables nor which tokens.

    block     0      1      2      3           4         num_blocks = 4
    holders   null   1      2      0           0         num_used = 2
    state            used   used   evictable   free      evictable: its content is kept until
                                                         the room is needed

A block's holders are the tables it is in, the steps in flight that it is held for, and the copies
that have yet to read it. Blocks come back tail first, as the prefix cache wants it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq

from jaxpage.config import NULL_BLOCK, CacheConfig
from jaxpage.host.moves import PendingMoves
from jaxpage.host.plan import BlockMoves
from jaxpage.host.prefix_cache import PrefixCache


class BlockPool:
    """The blocks' reference counts, their prefix cache and their pending moves, kept in step."""

    def __init__(self, config: CacheConfig, cache: PrefixCache) -> None:
        self.refs = RefCounts(config.num_blocks)
        self.cache = cache
        self.moves = PendingMoves()
        self.num_in_tables = 0
        """Blocks that are in some table."""
        self.num_entries = 0
        """Entries of all tables: a block counts once for each table it is in."""
        self.peak_saved = 0
        self.num_slots_in_use = 0
        """Slots filled, of the blocks in tables; a shared slot counts once."""
        self.num_held = 0
        """Blocks that are in no table and come back once a step in flight has been read."""
        self._block_size = config.block_size
        self._num_tables = [0] * (config.num_blocks + 1)
        self._held: deque[tuple[int, tuple[int, ...]]] = deque()  # (step id, blocks)
        self._num_holds: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones and evictable ones."""
        return self.refs.num_free + self.refs.num_evictable

    @property
    def num_slots_allocated(self) -> int:
        """Slots of the blocks in tables, a shared block once."""
        return self.num_in_tables * self._block_size

    @property
    def num_saved(self) -> int:
        """Blocks that the tables would need more if none were shared."""
        return self.num_entries - self.num_in_tables

    def num_tables(self, block: int) -> int:
        """Tables that a block is in."""
        return self._num_tables[block]

    def allocate(self) -> int:
        """An empty block, now in one table; evicts the least recently used one if none is free."""
        if not self.refs.num_free and self.refs.num_evictable:
            block = self.cache.evict()
            self._cancel_into(block)
            self.refs.evict(block)
        block = self.refs.allocate()
        self._num_tables[block] = 1
        self.num_in_tables += 1
        self.num_entries += 1
        return block

    def incref(self, block: int, num_filled: int) -> None:
        """A block in use, or an evictable one, is in one more table; `num_filled` of its slots
        are filled."""
        if self.cache.is_evictable(block):
            self.cache.touch(block)
            self.refs.touch(block)
        else:
            self.refs.incref(block)
        self.num_entries += 1
        self._num_tables[block] += 1
        if self._num_tables[block] == 1:
            self.num_in_tables += 1
            self.num_slots_in_use += num_filled
            self.num_held -= block in self._num_holds
        self.peak_saved = max(self.peak_saved, self.num_saved)

    def decref(self, blocks: Seq[int], num_filled: Seq[int], *, until_step: int | None) -> None:
        """Each block is in one table less, and held until `until_step` is read; None: not held."""
        if until_step is not None and blocks:
            self._held.append((until_step, tuple(blocks)))
            for block in blocks:
                self._num_holds[block] = self._num_holds.get(block, 0) + 1
        for block, filled in zip(reversed(blocks), reversed(num_filled), strict=True):
            self.num_entries -= 1
            self._num_tables[block] -= 1
            if not self._num_tables[block]:
                self.num_in_tables -= 1
                self.num_slots_in_use -= filled
                self.num_held += block in self._num_holds
            if until_step is None:
                self._remove_holder(block)

    def copy(self, source: int, destination: int) -> None:
        """The plan being made copies a block; until it is made the source is not written."""
        self.refs.incref(self.moves.copy(source, destination))

    def take_moves(self) -> BlockMoves:
        """The moves of the plan being made; the plans after it may write what they read."""
        pinned = self.moves.pinned
        moves = self.moves.take()
        for block in pinned:
            self._remove_holder(block)
        return moves

    def step_read(self, step_id: int) -> None:
        """Frees what was held for this step or an earlier one."""
        if not self._held:
            return
        ready = [blocks for step, blocks in self._held if step <= step_id]
        self._held = deque(held for held in self._held if held[0] > step_id)
        for blocks in ready:
            for block in reversed(blocks):
                self._num_holds[block] -= 1
                if not self._num_holds[block]:
                    del self._num_holds[block]
                    self.num_held -= not self._num_tables[block]
                self._remove_holder(block)

    def reset_cache(self) -> None:
        """Forgets every cached prefix; evictable blocks are free."""
        for block in self.cache.reset():
            self._cancel_into(block)
            self.refs.evict(block)

    def check_integrity(self, in_tables: Counter[int]) -> None:
        """`in_tables`: how many tables each block is in."""
        refs = self.refs
        refs.check_integrity()
        self.cache.check_integrity()
        held = Counter(block for _, blocks in self._held for block in blocks)
        assert dict(held) == self._num_holds, (held, self._num_holds)
        holders = in_tables + held + Counter(self.moves.pinned)
        for block in range(1, refs.num_blocks + 1):
            have = refs.num_holders(block)
            assert have == holders[block], f"block {block}: {have} holders, {holders[block]} found"
            assert self._num_tables[block] == in_tables[block], (block, self._num_tables[block])
            is_evictable = not have and self.cache.entry(block) is not None
            assert is_evictable == self.cache.is_evictable(block), f"block {block}: {have} holders"
        assert refs.num_evictable == self.cache.num_evictable, refs.num_evictable
        assert self.num_in_tables == len(in_tables), (self.num_in_tables, in_tables)
        assert self.num_entries == in_tables.total(), (self.num_entries, in_tables)
        assert self.num_held == len(held.keys() - in_tables.keys()), (self.num_held, held)
        assert self.num_free + refs.num_used == refs.num_blocks, self.num_free
        assert 0 <= self.num_saved <= self.peak_saved, (self.num_saved, self.peak_saved)

    def _remove_holder(self, block: int) -> None:
        is_cached = self.cache.entry(block) is not None
        if not self.refs.decref(block, keep=is_cached):
            return
        if is_cached:
            self.cache.mark_evictable(block)
        else:
            self._cancel_into(block)

    def _cancel_into(self, block: int) -> None:
        """The block is free: the plan being made must not write it."""
        source = self.moves.cancel_into(block)
        if source is not None:
            self._remove_holder(source)


class RefCounts:
    """How many holders each of the blocks 1 to num_blocks has."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.num_evictable = 0
        self.peak_used = 0
        self._num_holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, NULL_BLOCK, -1))  # taken from the end: low ids first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_evictable

    def num_holders(self, block: int) -> int:
        assert NULL_BLOCK < block <= self.num_blocks, f"no block {block} in 1..{self.num_blocks}"
        return self._num_holders[block]

    def allocate(self) -> int:
        """A free block, which has one holder now. There must be one: callers ask num_free first."""
        assert self._free, f"all {self.num_blocks} blocks are in use"
        block = self._free.pop()
        self._num_holders[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block

    def incref(self, block: int) -> None:
        """One more holder of a block that has one."""
        assert self.num_holders(block), f"block {block} is free, so it cannot be shared"
        self._num_holders[block] += 1

    def decref(self, block: int, *, keep: bool = False) -> bool:
        """One holder less; True: it was the last, and the block is free, evictable with `keep`."""
        holders = self._num_holders
        assert self.num_holders(block), f"block {block} is freed more often than it was taken"
        holders[block] -= 1
        if holders[block]:
            return False
        if keep:
            self.num_evictable += 1
        else:
            self._free.append(block)
        return True

    def touch(self, block: int) -> None:
        """An evictable block has one holder again."""
        assert not self.num_holders(block) and self.num_evictable, f"{block} is not evictable"
        self._num_holders[block] = 1
        self.num_evictable -= 1
        self.peak_used = max(self.peak_used, self.num_used)

    def evict(self, block: int) -> None:
        """An evictable block is free; what it holds is lost."""
        assert not self.num_holders(block) and self.num_evictable, f"{block} is not evictable"
        self.num_evictable -= 1
        self._free.append(block)

    def check_integrity(self) -> None:
        """Each block is free, evictable or held, never two of these; the null block is none."""
        free = set(self._free)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert NULL_BLOCK not in free and self._num_holders[NULL_BLOCK] == 0, "null block given out"
        num_evictable = 0
        for block in range(1, self.num_blocks + 1):
            holders = self._num_holders[block]
            assert holders >= 0, f"block {block} has {holders} holders"
            assert not (block in free and holders), f"block {block} is free with {holders}"
            num_evictable += not holders and block not in free
        assert num_evictable == self.num_evictable, (num_evictable, self.num_evictable)
        assert self.num_used <= self.peak_used <= self.num_blocks, (self.num_used, self.peak_used)
