"""The device blocks one by one: taken, shown by tables, held for a step, cached, given back.

Knows blocks and how many tables show them, neither which tables nor which tokens. A block's
holders are the tables that show it, the releases that wait for a step, and the copies that are
still to read it. Blocks come back tail first, as the prefix cache wants it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq

from jaxpage.config import CacheConfig
from jaxpage.host.block_pool import BlockPool
from jaxpage.host.moves import PendingMoves
from jaxpage.host.plan import BlockMoves
from jaxpage.host.prefix_cache import PrefixCache


class BlockLedger:
    """One pool, its prefix cache and its pending moves, kept in step."""

    def __init__(self, config: CacheConfig, cache: PrefixCache) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.cache = cache
        self.moves = PendingMoves()
        self.num_shown = 0
        """Blocks that some table shows."""
        self.num_entries = 0
        """Entries of all tables."""
        self.peak_saved = 0
        self.num_slots_in_use = 0
        """Slots filled, of the blocks that tables show, a shared slot once."""
        self.num_held = 0
        """Blocks that no table shows and that come back once a step in flight has been read."""
        self._num_tables = [0] * (config.num_blocks + 1)
        self._held: deque[tuple[int, tuple[int, ...]]] = deque()
        self._num_holds: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody uses."""
        return self.pool.num_free + self.pool.num_idle

    @property
    def num_saved(self) -> int:
        """Blocks that tables would need more if none were shared."""
        return self.num_entries - self.num_shown

    def num_tables(self, block: int) -> int:
        """Tables that show a block."""
        return self._num_tables[block]

    def take(self) -> int:
        """An empty block, now in one table; the least recently used cached one if none is free."""
        if not self.pool.num_free and self.pool.num_idle:
            block = self.cache.evict()
            self._cancel_into(block)
            self.pool.recycle(block)
        block = self.pool.allocate()
        self._num_tables[block] = 1
        self.num_shown += 1
        self.num_entries += 1
        return block

    def show(self, block: int, num_filled: int) -> None:
        """One more table shows a block that is in use or idle, with `num_filled` slots filled."""
        if self.cache.is_idle(block):
            self.cache.take_up(block)
            self.pool.revive(block)
        else:
            self.pool.share(block)
        self.num_entries += 1
        self._num_tables[block] += 1
        if self._num_tables[block] == 1:
            self.num_shown += 1
            self.num_slots_in_use += num_filled
            self.num_held -= block in self._num_holds
        self.peak_saved = max(self.peak_saved, self.num_saved)

    def hide(self, blocks: Seq[int], num_filled: Seq[int], *, until_step: int | None) -> None:
        """One table less shows each; they stay held until `until_step` is read, None for not."""
        if until_step is not None and blocks:
            self._held.append((until_step, tuple(blocks)))
            for block in blocks:
                self._num_holds[block] = self._num_holds.get(block, 0) + 1
        for block, filled in zip(reversed(blocks), reversed(num_filled), strict=True):
            self.num_entries -= 1
            self._num_tables[block] -= 1
            if not self._num_tables[block]:
                self.num_shown -= 1
                self.num_slots_in_use -= filled
                self.num_held += block in self._num_holds
            if until_step is None:
                self._drop(block)

    def copy(self, source: int, destination: int) -> None:
        """The plan being made copies a block; the source stays as it is until then."""
        self.pool.share(self.moves.copy(source, destination))

    def take_moves(self) -> BlockMoves:
        """Hands over the moves; what they read may be written by the plans after this one."""
        pinned = self.moves.pinned
        moves = self.moves.take()
        for block in pinned:
            self._drop(block)
        return moves

    def step_read(self, step_id: int) -> None:
        """Gives back what was held for this step or an earlier one."""
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
                self._drop(block)

    def reset_cache(self) -> None:
        """Forgets every cached prefix; the idle blocks are free."""
        for block in self.cache.reset():
            self._cancel_into(block)
            self.pool.recycle(block)

    def check_integrity(self, shown: Counter[int]) -> None:
        """`shown`: how many tables show each block."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        held = Counter(block for _, blocks in self._held for block in blocks)
        assert dict(held) == self._num_holds, (held, self._num_holds)
        holders = shown + held + Counter(self.moves.pinned)
        for block in range(1, self.pool.num_blocks + 1):
            have = self.pool.num_holders(block)
            assert have == holders[block], f"block {block}: {have} holders, {holders[block]} found"
            assert self._num_tables[block] == shown[block], (block, self._num_tables[block])
            is_idle = not have and self.cache.entry(block) is not None
            assert is_idle == self.cache.is_idle(block), f"block {block}: idle and in use, or lost"
        assert self.pool.num_idle == self.cache.num_idle, (self.pool.num_idle, self.cache.num_idle)
        assert self.num_shown == len(shown), (self.num_shown, shown)
        assert self.num_entries == shown.total(), (self.num_entries, shown)
        assert self.num_held == len(held.keys() - shown.keys()), (self.num_held, held)
        assert self.num_free + self.pool.num_used == self.pool.num_blocks, self.num_free
        assert 0 <= self.num_saved <= self.peak_saved, (self.num_saved, self.peak_saved)

    def _drop(self, block: int) -> None:
        """One holder less."""
        is_cached = self.cache.entry(block) is not None
        if not self.pool.free(block, keep=is_cached):
            return
        if is_cached:
            self.cache.let_go(block)
        else:
            self._cancel_into(block)

    def _cancel_into(self, block: int) -> None:
        source = self.moves.cancel_into(block)
        if source is not None:
            self._drop(source)
