"""Which blocks each sequence owns, shares, has cached or has on the host.

Knows sequence ids, lengths and tokens of full blocks; decides nothing. Everything acts on what has
been dispatched, in dispatch order:

    plan n is made     open, grow, prepare_write, swap_out, swap_in        in any order
    plan n dispatched  take_moves -> its moves; then `store` of each row, then `fork`, `release`
    plan n is read     step_read(n)

A table that is released while a step that touches it is unread is held and comes back with
`step_read`, so that no plan ever names a block that an unread plan uses for another sequence.
(The device runs plans in order, moves before the step, so an early reuse would still be read
right; the rule keeps the books simple to check. `swap_out` may pass None for that reason.)

    block_size 4, six tokens stored      blocks (5, 2)     5: a b c d     2: e f . .
    fork                                 both tables (5, 2)
    prepare_write of either              copy 2 -> 7, its table (5, 7); the other writes 2 in place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxpage.config import CacheConfig
from jaxpage.host.block_map import BlockMap, MappedBlock
from jaxpage.host.block_pool import BlockPool
from jaxpage.host.block_store import BlockStore
from jaxpage.host.block_table import BlockTable
from jaxpage.host.plan import BlockMoves
from jaxpage.host.prefix_cache import (
    CachedBlock,
    HashTokens,
    PrefixCache,
    PrefixHit,
    Space,
    hash_tokens,
    salted,
)
from jaxpage.host.swap_pool import SwappedBlock, SwappedTable, SwapPool


class BlockManager:
    """Block tables over one pool."""

    def __init__(
        self,
        cache: CacheConfig,
        *,
        enable_prefix_caching: bool = False,
        hash_tokens: HashTokens = hash_tokens,
    ) -> None:
        """`hash_tokens`: any function will do; it is made for tests of clashes."""
        self.cache = cache
        self.host = SwapPool(cache.num_swap_blocks)
        self._caching = enable_prefix_caching
        self._prefixes = PrefixCache(cache.block_size, hash_tokens=hash_tokens)
        self._store = BlockStore(cache, self._prefixes)
        self._tables: dict[int, BlockTable] = {}

    # ------------------------------------------------------------------ figures

    @property
    def pool(self) -> BlockPool:
        return self._store.pool

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody uses."""
        return self._store.num_free

    @property
    def num_cached(self) -> int:
        """Cached blocks that nobody uses; part of num_free."""
        return self._store.pool.num_idle

    @property
    def num_held(self) -> int:
        """Blocks that come back once a step that is in flight has been read."""
        return self._store.num_held

    @property
    def num_slots_allocated(self) -> int:
        """Slots of the blocks in tables, a shared block once."""
        return self._store.num_shown * self.cache.block_size

    @property
    def num_slots_in_use(self) -> int:
        """Slots filled, of the blocks in tables, a shared slot once."""
        return self._store.num_slots_in_use

    @property
    def blocks_saved_by_sharing(self) -> int:
        """Blocks more that the tables would need, did none share: entries less distinct blocks."""
        return self._store.num_saved

    @property
    def peak_blocks_saved(self) -> int:
        return self._store.peak_saved

    # ------------------------------------------------------------------ opening

    def match(
        self, token_ids: Seq[int], salt: str | None = None, *, most_tokens: int | None = None
    ) -> PrefixHit:
        """The cached blocks that begin these tokens; takes nothing, costs O(tokens).

        At most `most_tokens` of them, and at least one token is left to compute. The hit is good
        until a block is next taken: `open` with it first.
        """
        if not self._caching:
            return self.no_hit(salt)
        most = len(token_ids) - 1
        return self._prefixes.match(
            token_ids, salted(salt), most if most_tokens is None else min(most, most_tokens)
        )

    def no_hit(self, salt: str | None = None) -> PrefixHit:
        """The hit of one who must compute everything, but whose blocks others may find."""
        return PrefixHit(salted(salt))

    def num_needed(self, num_tokens: int, hit: PrefixHit | None = None) -> int:
        """Blocks of num_free that `open` takes; idle blocks of the hit count among them."""
        if hit is None:
            return self.cache.blocks_for(num_tokens)
        num_idle = 0
        for block in reversed(hit.block_ids):  # who uses a block uses those before it
            if not self._prefixes.is_idle(block):
                break
            num_idle += 1
        return self.cache.blocks_for(num_tokens) - len(hit.block_ids) + num_idle

    def can_open(self, num_tokens: int, hit: PrefixHit | None = None) -> bool:
        return self.num_needed(num_tokens, hit) <= self.num_free

    def open(self, seq_id: int, num_tokens: int, hit: PrefixHit | None = None) -> None:
        """Gives a sequence a table for `num_tokens` tokens, hit.num_tokens of them stored.

        There must be room. Without a hit, not even an empty one, nothing of it is ever cached.
        """
        self._check_new(seq_id)
        store, size = self._store, self.cache.block_size
        caching = hit is not None and self._caching
        hit = hit or PrefixHit()
        assert hit.last is None or hit.last.is_cached, f"a stale hit for sequence {seq_id}: {hit}"
        for block in hit.block_ids:
            store.show(block, size)
        num_new = self.cache.blocks_for(num_tokens) - len(hit.block_ids)
        assert num_new >= 0, (num_tokens, hit)
        block_ids = (*hit.block_ids, *(store.take() for _ in range(num_new)))
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
            self._store.show(block, filled)
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

    # ------------------------------------------------------------------ tables

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

    # ------------------------------------------------------------------ writing

    def num_blocks_to_write(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that `prepare_write` would take: new ones, and copies of shared ones."""
        table = self._tables[seq_id]
        if table.num_stored + num_tokens <= table.num_writable:
            return 0
        missing = self.cache.blocks_for(table.num_stored + num_tokens) - len(table.block_ids)
        return max(missing, 0) + len(self._shared_to_write(table, num_tokens))

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
        store, size = self._store, self.cache.block_size
        block_ids = list(table.block_ids)
        for index in self._shared_to_write(table, num_tokens):
            source, block_ids[index] = block_ids[index], store.take()
            filled = max(table.num_stored - index * size, 0)
            if filled:
                store.copy(source, block_ids[index])
                store.num_slots_in_use += filled
            store.hide((source,), (filled,), until_step=None)
        while len(block_ids) * size < end:
            block_ids.append(store.take())
        assert all(self._prefixes.entry(b) is None for b in block_ids[table.num_stored // size :])
        table.block_ids = tuple(block_ids)
        table.num_writable = self.cache.blocks_for(end) * size

    def grow(self, seq_id: int) -> None:
        """One block more. It must be free."""
        table, size = self._tables[seq_id], self.cache.block_size
        is_own = table.num_writable == len(table.block_ids) * size
        table.block_ids = (*table.block_ids, self._store.take())
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
        self._store.num_slots_in_use += num_tokens - table.num_stored
        table.num_stored = num_tokens
        if table.cache_at is not None and num_tokens >= table.cache_at <= len(token_ids):
            self._enter(table, token_ids, until_step)

    def release(self, seq_id: int, *, until_step: int | None) -> None:
        """Takes the table away: its blocks are free once `until_step` is read, None for now.

        What is cached of it stays findable, and counts as free once nobody uses it.
        """
        table = self._tables.pop(seq_id)
        self._store.hide(table.block_ids, self._fills(table), until_step=until_step)

    def take_moves(self) -> BlockMoves:
        """All moves of the plan that is dispatched now, and of no other plan."""
        self.host.plan_made()
        return self._store.take_moves()

    def step_read(self, step_id: int) -> None:
        """Frees what waited for this step or an earlier one."""
        self._store.step_read(step_id)

    def reset_prefix_cache(self) -> None:
        """Nothing filled before now is ever found again."""
        self._store.reset_cache()

    # ------------------------------------------------------------------ swapping

    def num_to_swap_out(self, seq_ids: Iterable[int]) -> int:
        """Blocks that `swap_out` moves: the filled ones of the gang, a shared block once."""
        return len(self._filled_blocks(seq_ids))

    def can_swap_out(self, seq_ids: Iterable[int]) -> bool:
        return self.num_to_swap_out(seq_ids) <= self.host.num_free

    def swap_out(self, seq_ids: Iterable[int], *, until_step: int | None) -> int:
        """Moves a gang's tables to the host; returns the number of blocks that the plan moves.

        Everything that is filled is copied, cached blocks and blocks that others share too: what
        stays on the device may be evicted or given back before the gang returns. Sequences that
        return to the device in the plan being made must not leave in it.

        `until_step`: None frees the device blocks for the plan being made. That is safe with an
        unread step in flight: the plan's moves run after that step's writes and before whatever
        writes the blocks next, and its results are the host's to keep. A step id holds them.
        """
        gang = tuple(seq_ids)
        host_blocks: dict[int, int] = {}
        for block in self._filled_blocks(gang):
            host_blocks[block] = self.host.allocate()
            self._store.moves.swap_out(block, host_blocks[block])
        for seq_id in gang:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            swapped = SwappedTable(
                blocks=tuple(
                    SwappedBlock(host_blocks[block], self._prefixes.entry(block))
                    for block in table.block_ids[:num_filled]
                ),
                num_stored=table.num_stored,
                num_cached=table.num_cached,
                space=table.space,
                epoch=table.epoch,
            )
            self.host.put(seq_id, swapped)
        for seq_id in gang:
            self.release(seq_id, until_step=until_step)
        return len(host_blocks)

    def is_swapped(self, seq_id: int) -> bool:
        return seq_id in self.host.tables

    def num_needed_to_swap_in(self, seq_ids: Iterable[int]) -> int:
        """Blocks of num_free that `swap_in` takes."""
        needed: set[tuple[str, int]] = set()
        for seq_id in seq_ids:
            for swapped in self.host.tables[seq_id].blocks:
                if not swapped.is_on_device:
                    needed.add(("host", swapped.host_block))
                elif swapped.entry is not None and self._prefixes.is_idle(swapped.entry.block):
                    needed.add(("device", swapped.entry.block))
        return len(needed)

    def swap_in(self, seq_ids: Iterable[int]) -> int:
        """Brings a gang's tables back, shared as they were; returns the blocks the plan moves.

        There must be room. Blocks that are still in the prefix cache are used where they are. The
        tables hold what is stored and nothing more: `prepare_write` comes next. The host blocks
        are free once the plan has been made.
        """
        tables = {seq_id: self.host.pick_up(seq_id) for seq_id in seq_ids}
        store, size = self._store, self.cache.block_size
        shown = {seq_id: self._show_cached(table) for seq_id, table in tables.items()}
        device: dict[int, int] = {}  # host block: device block
        for seq_id, table in tables.items():
            block_ids = shown[seq_id]
            num_cached = min(len(block_ids), table.num_cached)
            for swapped in table.blocks[len(block_ids) :]:
                filled = min(table.num_stored - len(block_ids) * size, size)
                if swapped.host_block in device:
                    store.show(device[swapped.host_block], filled)
                else:
                    device[swapped.host_block] = store.take()
                    store.num_slots_in_use += filled
                    store.moves.swap_in(swapped.host_block, device[swapped.host_block])
                block_ids.append(device[swapped.host_block])
            self._tables[seq_id] = self._returned(table, tuple(block_ids), num_cached)
        return len(device)

    def drop_swapped(self, seq_id: int) -> None:
        """A sequence on the host has ended: its host blocks are free."""
        for host_block in self.host.drop(seq_id):
            self._store.moves.cancel_into_host(host_block)

    # ------------------------------------------------------------------ looking

    def block_map(self) -> BlockMap:
        """Who owns which block now. O(pool): for pictures, not for steps."""
        owners: dict[int, list[int]] = {}
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            for block, num_filled in zip(table.block_ids, self._fills(table), strict=True):
                owners.setdefault(block, []).append(seq_id)
                filled[block] = num_filled
        size = self.cache.block_size
        blocks: list[MappedBlock] = []
        for block in range(1, self.cache.num_blocks + 1):
            is_cached = self._prefixes.entry(block) is not None
            if block in owners:
                mapped = MappedBlock("owned", tuple(owners[block]), filled[block], is_cached)
            elif self.pool.num_holders(block):
                mapped = MappedBlock("held", is_cached=is_cached)
            else:
                kind = "cached" if is_cached else "free"
                mapped = MappedBlock(kind, (), size * is_cached, is_cached)
            blocks.append(mapped)
        return BlockMap(block_size=size, blocks=tuple(blocks))

    def check_integrity(self) -> None:
        """Tables, held blocks, copies, cache and host blocks account for everything, once."""
        shown = Counter(block for table in self._tables.values() for block in table.block_ids)
        self._store.check_integrity(shown)
        self.host.check_integrity()
        assert not self._tables.keys() & self.host.tables.keys(), "on the device and on the host"
        size = self.cache.block_size
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            assert table.num_stored <= len(table.block_ids) * size, (seq_id, table)
            for block, num_filled in zip(table.block_ids, self._fills(table), strict=True):
                assert filled.setdefault(block, num_filled) == num_filled, (seq_id, block, filled)
            self._check_own(seq_id, table, shown)
            self._check_chain(seq_id, table)
        assert self.num_slots_in_use == sum(filled.values()), (self.num_slots_in_use, filled)

    # ------------------------------------------------------------------ inside

    def _check_new(self, seq_id: int) -> None:
        assert seq_id not in self._tables, f"sequence {seq_id} has a table"
        assert seq_id not in self.host.tables, f"sequence {seq_id} is swapped out"

    def _check_own(self, seq_id: int, table: BlockTable, shown: Counter[int]) -> None:
        size = self.cache.block_size
        for position in range(table.num_stored, table.num_writable):
            block = table.block_ids[position // size]
            assert shown[block] == 1, f"{seq_id} may write {block}, which {shown[block]} show"
            assert self._prefixes.entry(block) is None, f"{seq_id} may write the cached {block}"

    def _check_chain(self, seq_id: int, table: BlockTable) -> None:
        """Who shows a cached block shows its ancestors: that is what keeps eviction simple."""
        parent: CachedBlock | Space | None = table.space
        for index, block in enumerate(table.block_ids):
            entry = self._prefixes.entry(block)
            if entry is not None:
                assert parent is not None and entry.parent == parent, (seq_id, block, entry)
            assert index >= table.num_cached or table.epoch != self._prefixes.epoch or entry
            parent = entry

    def _fills(self, table: BlockTable) -> list[int]:
        """Slots filled, block by block."""
        size, stored = self.cache.block_size, table.num_stored
        num_full = stored // size
        fills = [size] * num_full + [0] * (len(table.block_ids) - num_full)
        if stored % size:
            fills[num_full] = stored % size
        return fills

    def _filled_blocks(self, seq_ids: Iterable[int]) -> dict[int, None]:
        """The gang's blocks that hold something, each once, in order."""
        blocks: dict[int, None] = {}
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            blocks.update(dict.fromkeys(table.block_ids[:num_filled]))
        return blocks

    def _shared_to_write(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Indices of the table's blocks that the next tokens fall into and others show too."""
        size = self.cache.block_size
        first, end = table.num_stored // size, self.cache.blocks_for(table.num_stored + num_tokens)
        return [
            index
            for index in range(first, min(end, len(table.block_ids)))
            if self._store.num_tables(table.block_ids[index]) > 1
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
                if self._store.num_tables(block) > 1:
                    break  # those who share it must go on holding the same ancestors
                block_ids[table.num_cached] = entry.block
                self._store.show(entry.block, size)
                self._store.hide((block,), (size,), until_step=until_step)
            table.num_cached += 1
            table.parent = entry
        if block_ids != list(table.block_ids):
            table.block_ids = tuple(block_ids)
        table.cache_at = end

    def _show_cached(self, table: SwappedTable) -> list[int]:
        """Shows the leading blocks of a swapped table that the cache still has."""
        block_ids: list[int] = []
        for swapped in table.blocks:
            if swapped.entry is None or not swapped.is_on_device:
                break
            self._store.show(swapped.entry.block, self.cache.block_size)
            block_ids.append(swapped.entry.block)
        return block_ids

    def _returned(
        self, table: SwappedTable, block_ids: tuple[int, ...], num_cached: int
    ) -> BlockTable:
        last = table.blocks[num_cached - 1].entry if num_cached else None
        caching = table.epoch == self._prefixes.epoch
        return BlockTable(
            block_ids=block_ids,
            num_stored=table.num_stored,
            num_writable=table.num_stored,
            num_cached=num_cached,
            cache_at=(num_cached + 1) * self.cache.block_size if caching else None,
            parent=last or table.space,
            space=table.space,
            epoch=table.epoch,
        )
