"""Block tables on the device: opened, shared, written, cached, given back.

Knows sequence ids, lengths and the tokens of full blocks; no host block. Everything acts on what
has been dispatched, in dispatch order. A table that is released while a step that touches it is
unread is held and comes back with `step_read`, so that no plan ever writes a block for one
sequence that an unread plan uses for another. (The device runs plans in order, so an early reuse
would still be read right; the rule keeps the books simple to check.)

    block_size 4, six tokens stored      blocks (5, 2)     5: a b c d     2: e f . .
    fork                                 both tables (5, 2)
    prepare_write of either              copy 2 -> 7, its table (5, 7); the other writes 2 in place
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxpage.config import CacheConfig
from jaxpage.host.block_ledger import BlockLedger
from jaxpage.host.block_pool import BlockPool
from jaxpage.host.block_table import BlockTable
from jaxpage.host.prefix_cache import HashTokens, PrefixCache, PrefixHit, hash_tokens


class BlockTables:
    """Tables over one pool and one prefix cache."""

    def __init__(
        self,
        cache: CacheConfig,
        *,
        enable_prefix_caching: bool = False,
        hash_tokens: HashTokens = hash_tokens,
    ) -> None:
        """`hash_tokens`: any function will do; it is made for tests of clashes."""
        self.cache = cache
        self._caching = enable_prefix_caching
        self._prefixes = PrefixCache(cache.block_size, hash_tokens=hash_tokens)
        self._ledger = BlockLedger(cache, self._prefixes)
        self._tables: dict[int, BlockTable] = {}

    @property
    def pool(self) -> BlockPool:
        return self._ledger.pool

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody uses."""
        return self._ledger.num_free

    @property
    def num_cached(self) -> int:
        """Cached blocks that nobody uses; part of num_free."""
        return self._ledger.pool.num_idle

    @property
    def num_evicted(self) -> int:
        """Cached blocks whose content has been given up for room, since the start."""
        return self._prefixes.num_evicted

    @property
    def num_held(self) -> int:
        """Blocks that come back once a step that is in flight has been read."""
        return self._ledger.num_held

    @property
    def num_slots_allocated(self) -> int:
        """Slots of the blocks in tables, a shared block once."""
        return self._ledger.num_shown * self.cache.block_size

    @property
    def num_slots_in_use(self) -> int:
        """Slots filled, of the blocks in tables, a shared slot once."""
        return self._ledger.num_slots_in_use

    @property
    def blocks_saved_by_sharing(self) -> int:
        """Blocks more that the tables would need, did none share: entries less distinct blocks."""
        return self._ledger.num_saved

    @property
    def peak_blocks_saved(self) -> int:
        return self._ledger.peak_saved

    def open(self, seq_id: int, num_tokens: int, hit: PrefixHit | None = None) -> None:
        """Gives a sequence a table for `num_tokens` tokens, hit.num_tokens of them stored.

        There must be room. Without a hit, not even an empty one, nothing of it is ever cached.
        """
        self._check_new(seq_id)
        ledger, size = self._ledger, self.cache.block_size
        caching = hit is not None and self._caching
        hit = hit or PrefixHit()
        assert hit.last is None or hit.last.is_cached, f"a stale hit for sequence {seq_id}: {hit}"
        for block in hit.block_ids:
            ledger.show(block, size)
        num_new = self.cache.blocks_for(num_tokens) - len(hit.block_ids)
        assert num_new >= 0, (num_tokens, hit)
        block_ids = (*hit.block_ids, *(ledger.take() for _ in range(num_new)))
        self._tables[seq_id] = BlockTable(
            block_ids=block_ids,
            num_stored=hit.num_tokens,
            num_writable=len(block_ids) * size,
            num_cached=len(hit.block_ids),
            cache_at=hit.num_tokens + size if caching else None,
            parent=hit.last or hit.space,
            space=hit.space,
            epoch=self._prefixes.epoch if caching else None,
        )

    def fork(self, parent_seq_id: int, child_seq_id: int) -> None:
        """A table for the child that shares all the parent's blocks. Takes none."""
        self._check_new(child_seq_id)
        parent = self._tables[parent_seq_id]
        for block, filled in zip(parent.block_ids, self._fills(parent), strict=True):
            self._ledger.show(block, filled)
        parent.num_writable = parent.num_stored
        self._tables[child_seq_id] = BlockTable(
            block_ids=parent.block_ids,
            num_stored=parent.num_stored,
            num_writable=parent.num_stored,
            num_cached=parent.num_cached,
            cache_at=parent.cache_at,
            parent=parent.parent,
            space=parent.space,
            epoch=parent.epoch,
        )

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in logical order; the same object until they change."""
        return self._tables[seq_id].block_ids

    def capacity(self, seq_id: int) -> int:
        """Tokens that the sequence's table can hold."""
        return len(self._tables[seq_id].block_ids) * self.cache.block_size

    def num_stored(self, seq_id: int) -> int:
        """Tokens that dispatched steps have stored, or that a hit brought."""
        return self._tables[seq_id].num_stored

    def num_blocks_to_write(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that `prepare_write` would take: new ones, and copies of shared ones.

        With 0 the positions are writable as they are, and `prepare_write` may be left out.
        """
        table = self._tables[seq_id]
        if table.num_stored + num_tokens <= table.num_writable:
            return 0
        num_blocks = self.cache.blocks_for(table.num_stored + num_tokens)
        needed = max(num_blocks - len(table.block_ids), 0)
        needed += len(self._shared_to_write(table, num_tokens))
        if not needed:  # it was shared when last asked, and is its own now
            table.num_writable = num_blocks * self.cache.block_size
        return needed

    def prepare_write(self, seq_id: int, num_tokens: int) -> None:
        """Makes the next `num_tokens` positions writable; the blocks for it must be free.

        Grows the table, and replaces a shared block that would be written by one of its own: the
        copy of what it holds goes into the moves of the plan being made. The last table that
        shows a block writes it in place.
        """
        table = self._tables[seq_id]
        end = table.num_stored + num_tokens
        if end <= table.num_writable:
            return
        ledger, size = self._ledger, self.cache.block_size
        block_ids = list(table.block_ids)
        for index in self._shared_to_write(table, num_tokens):
            source, block_ids[index] = block_ids[index], ledger.take()
            filled = max(table.num_stored - index * size, 0)
            if filled:
                ledger.copy(source, block_ids[index])
                ledger.num_slots_in_use += filled
            ledger.hide((source,), (filled,), until_step=None)
        while len(block_ids) * size < end:
            block_ids.append(ledger.take())
        assert all(self._prefixes.entry(b) is None for b in block_ids[table.num_stored // size :])
        if block_ids != list(table.block_ids):
            table.block_ids = tuple(block_ids)
        table.num_writable = self.cache.blocks_for(end) * size

    def grow(self, seq_id: int) -> None:
        """One block more. It must be free."""
        table, size = self._tables[seq_id], self.cache.block_size
        is_own = table.num_writable == len(table.block_ids) * size
        table.block_ids = (*table.block_ids, self._ledger.take())
        table.num_writable += size * is_own

    def store(
        self,
        seq_id: int,
        num_tokens: int,
        token_ids: Seq[int] = (),
        *,
        until_step: int | None = None,
    ) -> None:
        """Notes that a dispatched step fills the table up to `num_tokens`.

        `token_ids`: all the sequence's known tokens; its full blocks of them become cached. A
        block whose content is cached already gives way to the cached one, unless another table
        shows it too; it is held until `until_step`, the step that writes it, is read.
        """
        table = self._tables[seq_id]
        assert num_tokens <= table.num_writable, (seq_id, num_tokens, table)
        self._ledger.num_slots_in_use += num_tokens - table.num_stored
        table.num_stored = num_tokens
        if table.cache_at is not None and num_tokens >= table.cache_at <= len(token_ids):
            self._enter(table, token_ids, until_step)

    def release(self, seq_id: int, *, until_step: int | None) -> None:
        """Takes the table away: its blocks are free once `until_step` is read, None for now.

        What is cached of it stays findable, and counts as free once nobody uses it.
        """
        table = self._tables.pop(seq_id)
        self._ledger.hide(table.block_ids, self._fills(table), until_step=until_step)

    def step_read(self, step_id: int) -> None:
        """Frees what waited for this step or an earlier one."""
        self._ledger.step_read(step_id)

    def _check_new(self, seq_id: int) -> None:
        """A sequence is opened or forked to once."""
        assert seq_id not in self._tables, f"sequence {seq_id} has a table"

    def _fills(self, table: BlockTable) -> list[int]:
        """Slots filled, block by block."""
        size, stored = self.cache.block_size, table.num_stored
        num_full = stored // size
        fills = [size] * num_full + [0] * (len(table.block_ids) - num_full)
        if stored % size:
            fills[num_full] = stored % size
        return fills

    def _shared_to_write(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Indices of the table's blocks that the next tokens fall into and others show too."""
        size = self.cache.block_size
        first, end = table.num_stored // size, self.cache.blocks_for(table.num_stored + num_tokens)
        return [
            index
            for index in range(first, min(end, len(table.block_ids)))
            if self._ledger.num_tables(table.block_ids[index]) > 1
        ]

    def _enter(self, table: BlockTable, token_ids: Seq[int], until_step: int | None) -> None:
        """Caches the full blocks of known tokens, as far as the chain goes."""
        if table.epoch != self._prefixes.epoch:
            table.cache_at = None
            return
        size = self.cache.block_size
        block_ids = list(table.block_ids)
        while (end := (table.num_cached + 1) * size) <= min(table.num_stored, len(token_ids)):
            tokens = tuple(token_ids[end - size : end])
            block = block_ids[table.num_cached]
            entry = self._prefixes.find(table.parent, tokens)
            if entry is None:
                entry = self._prefixes.add(table.parent, tokens, block)
            elif entry.block != block:
                if self._ledger.num_tables(block) > 1:
                    end = (table.num_stored // size + 1) * size  # asks again when that is full
                    break  # those who share it must go on holding the same ancestors
                block_ids[table.num_cached] = entry.block
                self._ledger.show(entry.block, size)
                self._ledger.hide((block,), (size,), until_step=until_step)
            table.num_cached += 1
            table.parent = entry
        if block_ids != list(table.block_ids):
            table.block_ids = tuple(block_ids)
        table.cache_at = end
