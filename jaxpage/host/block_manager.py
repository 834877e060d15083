"""Which blocks each sequence owns, and which still wait for a step to be read.

Knows sequence ids and lengths, no tokens. A table that is released while a step that touches it
is unread goes to the held blocks and comes back with `step_read`, so that no plan ever names a
block that an unread plan uses for another sequence.

    block_size 4, six tokens stored      blocks (5, 2)     5: a b c d     2: e f . .
    capacity 8, slots in use 6           the ninth token needs `grow`
"""

from __future__ import annotations

from collections import Counter, deque

from jaxpage.config import CacheConfig
from jaxpage.host.block_pool import BlockPool


class BlockManager:
    """Block tables over one pool."""

    def __init__(self, cache: CacheConfig) -> None:
        self.cache = cache
        self.pool = BlockPool(cache.num_blocks)
        self._tables: dict[int, tuple[int, ...]] = {}
        self._num_stored: dict[int, int] = {}
        self._held: deque[tuple[int, tuple[int, ...]]] = deque()
        self.num_held = 0
        """Blocks that come back once a step that is in flight has been read."""
        self.num_slots_in_use = 0
        """Tokens stored in the tables."""

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_slots_allocated(self) -> int:
        """Slots of the blocks in tables."""
        return (self.pool.num_used - self.num_held) * self.cache.block_size

    def open(self, seq_id: int, num_tokens: int) -> None:
        """Gives a sequence a table for `num_tokens` tokens. The blocks must be free."""
        assert seq_id not in self._tables, f"sequence {seq_id} has a table"
        num_blocks = self.cache.blocks_for(num_tokens)
        self._tables[seq_id] = tuple(self.pool.allocate() for _ in range(num_blocks))
        self._num_stored[seq_id] = 0

    def grow(self, seq_id: int) -> None:
        """One block more. It must be free."""
        self._tables[seq_id] = (*self._tables[seq_id], self.pool.allocate())

    def table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in logical order; the same object until they change."""
        return self._tables[seq_id]

    def capacity(self, seq_id: int) -> int:
        """Tokens that the sequence's table can hold."""
        return len(self._tables[seq_id]) * self.cache.block_size

    def store(self, seq_id: int, num_tokens: int) -> None:
        """Notes that a dispatched step fills the table up to `num_tokens`."""
        assert num_tokens <= self.capacity(seq_id), (seq_id, num_tokens, self._tables[seq_id])
        self.num_slots_in_use += num_tokens - self._num_stored[seq_id]
        self._num_stored[seq_id] = num_tokens

    def release(self, seq_id: int, *, until_step: int | None) -> None:
        """Takes the table away: its blocks are free once `until_step` is read, None for now."""
        blocks = self._tables.pop(seq_id)
        self.num_slots_in_use -= self._num_stored.pop(seq_id)
        if until_step is None:
            self._free(blocks)
        else:
            self._held.append((until_step, blocks))
            self.num_held += len(blocks)

    def step_read(self, step_id: int) -> None:
        """Frees what waited for this step or an earlier one."""
        ready = [blocks for step, blocks in self._held if step <= step_id]
        if not ready:
            return
        self._held = deque(held for held in self._held if held[0] > step_id)
        for blocks in ready:
            self.num_held -= len(blocks)
            self._free(blocks)

    def check_integrity(self) -> None:
        """Every block in use is accounted for by the tables and the held blocks."""
        self.pool.check_integrity()
        holders = Counter(block for blocks in self._tables.values() for block in blocks)
        holders.update(block for _, blocks in self._held for block in blocks)
        for block in range(1, self.cache.num_blocks + 1):
            have = self.pool.num_holders(block)
            assert have == holders[block], f"block {block}: {have} holders, {holders[block]} found"
        assert self.num_held == sum(len(blocks) for _, blocks in self._held), self.num_held
        assert self._num_stored.keys() == self._tables.keys(), "a table without a length"
        assert self.num_slots_in_use == sum(self._num_stored.values()), self.num_slots_in_use
        for seq_id, num_tokens in self._num_stored.items():
            assert num_tokens <= self.capacity(seq_id), (seq_id, num_tokens)

    def _free(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):
            self.pool.free(block)
