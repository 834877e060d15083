"""Which blocks each sequence owns, shares, finds in the prefix cache or has on the host.

Knows sequence ids, lengths and the tokens of full blocks; decides nothing. Everything acts on what
has been dispatched, in dispatch order. One plan, in the order of calls:

    plan n is made         match, open, prepare_write, swap_out, swap_in, free      in any order
    plan n is dispatched   take_moves: what plan n carries; then store of each row;
                           then fork of what drew several tokens, free of what has ended
    plan n is read         step_read(n)

A table that is freed while a step that touches it is unread is held until `step_read`, so that no
plan ever writes a block for one sequence that an unread plan uses for another. (The device runs
plans in order, so reuse before that would read right too; the rule keeps integrity easy to check.)

    block_size 4, six tokens stored      blocks (5, 2)     5: a b c d     2: e f . .
    fork                                 both tables (5, 2)
    prepare_write of either              copy 2 -> 7, its table (5, 7); the other writes 2 in place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from jaxpage.config import CacheConfig
from jaxpage.host.block_pool import BlockPool
from jaxpage.host.plan import BlockMoves, Namespace
from jaxpage.host.prefix_cache import (
    CachedBlock,
    HashTokens,
    PrefixCache,
    PrefixHit,
    hash_tokens,
)
from jaxpage.host.swap_pool import SwappedBlock, SwappedTable, SwapPool
from jaxpage.outputs import BlockMap, MappedBlock


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks. Block size 4, ten tokens stored, 7 shared with another sample:

    blocks         5: a b c d   2: e f g h   7: i j . .   9: . . . .
    num_stored     10           num_cached 1: block 2 may be entered under 5's entry
    num_writable   10           a write at 10 needs a copy of 7; were 7 its own: 16
    """

    block_ids: tuple[int, ...]
    num_stored: int
    num_writable: int
    """Positions from num_stored up to this one are in blocks of its own, so far as is known."""
    num_cached: int
    """Leading blocks that are entries of the prefix cache."""
    cache_at: int | None
    """Stored tokens at which the next block can be entered; None: nothing is cached any more."""
    parent: CachedBlock | Namespace
    """The entry of the last cached block, or the namespace while there is none."""
    namespace: Namespace
    generation: int | None
    """The cache's when this was filled; None caches nothing."""


class BlockManager:
    """The tables of all sequences, on the device and on the host, over one pool of each."""

    def __init__(
        self,
        cache: CacheConfig,
        *,
        enable_prefix_caching: bool,
        hash_tokens: HashTokens = hash_tokens,
    ) -> None:
        """`hash_tokens`: any function will do; tests of clashes pass their own."""
        self.cache = cache
        self._caching = enable_prefix_caching
        self._prefixes = PrefixCache(cache.block_size, hash_tokens=hash_tokens)
        self.pool = BlockPool(cache, self._prefixes)
        self._host = SwapPool(cache.num_swap_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken; those that only the prefix cache keeps are among them."""
        return self.pool.num_free

    @property
    def num_held(self) -> int:
        """Blocks that come back once a step that is in flight has been read."""
        return self.pool.num_held

    def match(
        self, token_ids: Seq[int], namespace: Namespace = (), *, most_tokens: int | None = None
    ) -> PrefixHit:
        """The cached blocks that begin these tokens; takes none of them, costs O(tokens).

        They hold at most `most_tokens`, and at least one token is left to compute. The hit is good
        until a block is next taken: `open` with it first.
        """
        if not self._caching:
            return PrefixHit(namespace)
        most = len(token_ids) - 1
        return self._prefixes.match(
            token_ids, namespace, most if most_tokens is None else min(most, most_tokens)
        )

    def num_needed(self, num_tokens: int, hit: PrefixHit) -> int:
        """Blocks of num_free that `open` takes; evictable blocks of the hit count among them."""
        num_evictable = 0
        for block in reversed(hit.block_ids):  # a block in use has its ancestors in use too
            if not self._prefixes.is_evictable(block):
                break
            num_evictable += 1
        return self.cache.blocks_for(num_tokens) - len(hit.block_ids) + num_evictable

    def open(self, seq_id: int, num_tokens: int, hit: PrefixHit) -> None:
        """Gives a sequence a table for `num_tokens` tokens, hit.num_tokens of them stored.

        There must be room.
        """
        self._check_new(seq_id)
        pool, size = self.pool, self.cache.block_size
        assert hit.last is None or hit.last.is_cached, f"a stale hit for sequence {seq_id}: {hit}"
        for block in hit.block_ids:
            pool.incref(block, size)
        num_new = self.cache.blocks_for(num_tokens) - len(hit.block_ids)
        assert num_new >= 0, (num_tokens, hit)
        block_ids = (*hit.block_ids, *(pool.allocate() for _ in range(num_new)))
        self._tables[seq_id] = BlockTable(
            block_ids=block_ids,
            num_stored=hit.num_tokens,
            num_writable=len(block_ids) * size,
            num_cached=len(hit.block_ids),
            cache_at=hit.num_tokens + size if self._caching else None,
            parent=hit.last or hit.namespace,
            namespace=hit.namespace,
            generation=self._prefixes.generation if self._caching else None,
        )

    def fork(self, parent_seq_id: int, child_seq_id: int) -> None:
        """A table for the child that shares all the parent's blocks. Takes none."""
        self._check_new(child_seq_id)
        parent = self._tables[parent_seq_id]
        for block, filled in zip(parent.block_ids, self._fills(parent), strict=True):
            self.pool.incref(block, filled)
        parent.num_writable = parent.num_stored
        self._tables[child_seq_id] = replace(parent)

    def free(self, seq_id: int, *, until_step: int | None) -> None:
        """Takes the table away: its blocks are free once `until_step` is read, None for now.

        What is cached of it can still be found, and counts as free once it is in no table.
        """
        table = self._tables.pop(seq_id)
        self.pool.decref(table.block_ids, self._fills(table), until_step=until_step)

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def table(self, seq_id: int) -> tuple[int, ...]:
        """The sequence's blocks in logical order; the same object until they change."""
        return self._tables[seq_id].block_ids

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
        copy of what it holds goes into the moves of the plan being made. The last table that a
        block is in writes it in place.
        """
        table = self._tables[seq_id]
        end = table.num_stored + num_tokens
        if end <= table.num_writable:
            return
        pool, size = self.pool, self.cache.block_size
        block_ids = list(table.block_ids)
        for index in self._shared_to_write(table, num_tokens):
            source, block_ids[index] = block_ids[index], pool.allocate()
            filled = max(table.num_stored - index * size, 0)
            if filled:
                pool.copy(source, block_ids[index])
                pool.num_slots_in_use += filled
            pool.decref((source,), (filled,), until_step=None)
        while len(block_ids) * size < end:
            block_ids.append(pool.allocate())
        assert all(self._prefixes.entry(b) is None for b in block_ids[table.num_stored // size :])
        if block_ids != list(table.block_ids):
            table.block_ids = tuple(block_ids)
        table.num_writable = self.cache.blocks_for(end) * size

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
        block whose content is cached already is replaced by the cached one, unless it is in
        another table too; it is held until `until_step`, the step that writes it, is read.
        """
        table = self._tables[seq_id]
        assert num_tokens <= table.num_writable, (seq_id, num_tokens, table)
        self.pool.num_slots_in_use += num_tokens - table.num_stored
        table.num_stored = num_tokens
        if table.cache_at is not None and num_tokens >= table.cache_at <= len(token_ids):
            self._cache_blocks(table, token_ids, until_step)

    def take_moves(self) -> BlockMoves:
        """All moves of the plan that is dispatched now, and of no other plan."""
        self._host.plan_made()
        return self.pool.take_moves()

    def step_read(self, step_id: int) -> None:
        """Frees what was held for this step or an earlier one."""
        self.pool.step_read(step_id)

    def reset_prefix_cache(self) -> None:
        """Nothing filled before now is ever found again."""
        self.pool.reset_cache()

    def is_swapped(self, seq_id: int) -> bool:
        return seq_id in self._host.tables

    def num_to_swap_out(self, seq_ids: Iterable[int]) -> int:
        """Blocks that `swap_out` moves: the filled ones of the group, a shared block once."""
        return len(self._filled_blocks(seq_ids))

    def can_swap_out(self, seq_ids: Iterable[int]) -> bool:
        return self.num_to_swap_out(seq_ids) <= self._host.num_free

    def swap_out(self, seq_ids: Iterable[int], *, until_step: int | None) -> int:
        """Moves a group's tables to the host; returns the number of host blocks they fill.

        Everything that is filled is copied, cached blocks and blocks of others' tables too: what
        stays on the device may be evicted or freed before the group returns.

        `until_step`: None frees the device blocks for the plan being made. That is safe with an
        unread step in flight: the plan's moves run after that step's writes and before whatever
        writes the blocks next, and its results are the host's to keep. A step id holds them.
        """
        group = tuple(seq_ids)
        host_blocks = {block: self._to_host(block) for block in self._filled_blocks(group)}
        for seq_id in group:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            swapped = SwappedTable(
                blocks=tuple(
                    SwappedBlock(host_blocks[block], self._prefixes.entry(block))
                    for block in table.block_ids[:num_filled]
                ),
                num_stored=table.num_stored,
                namespace=table.namespace,
                generation=table.generation,
            )
            self._host.put(seq_id, swapped)
        for seq_id in group:
            self.free(seq_id, until_step=until_step)
        return len(host_blocks)

    def num_needed_to_swap_in(self, seq_ids: Iterable[int]) -> int:
        """Blocks of num_free that `swap_in` takes."""
        needed: set[tuple[str, int]] = set()
        for seq_id in seq_ids:
            for swapped in self._host.tables[seq_id].blocks:
                if not swapped.is_on_device:
                    needed.add(("host", swapped.host_block))
                elif swapped.entry is not None and self._prefixes.is_evictable(swapped.entry.block):
                    needed.add(("device", swapped.entry.block))
        return len(needed)

    def swap_in(self, seq_ids: Iterable[int]) -> int:
        """Brings a group's tables back, shared as they were; returns the blocks the plan moves.

        There must be room. Blocks that are still in the prefix cache are used where they are. The
        tables hold what is stored and nothing more: `prepare_write` comes next. The host blocks
        are free once the plan has been made.
        """
        tables = {seq_id: self._host.take(seq_id) for seq_id in seq_ids}
        pool, size = self.pool, self.cache.block_size
        still_cached = {seq_id: self._take_cached(table) for seq_id, table in tables.items()}
        device: dict[int, int] = {}  # host block: device block
        for seq_id, table in tables.items():
            block_ids = still_cached[seq_id]
            num_cached = len(block_ids)
            for swapped in table.blocks[num_cached:]:
                filled = min(table.num_stored - len(block_ids) * size, size)
                if swapped.host_block in device:
                    pool.incref(device[swapped.host_block], filled)
                else:
                    device[swapped.host_block] = pool.allocate()
                    pool.num_slots_in_use += filled
                    pool.moves.swap_in(swapped.host_block, device[swapped.host_block])
                block_ids.append(device[swapped.host_block])
            last = table.blocks[num_cached - 1].entry if num_cached else None
            self._tables[seq_id] = BlockTable(
                block_ids=tuple(block_ids),
                num_stored=table.num_stored,
                num_writable=table.num_stored,
                num_cached=num_cached,
                cache_at=(num_cached + 1) * size,
                parent=last or table.namespace,
                namespace=table.namespace,
                generation=table.generation,
            )
        return len(device)

    def free_swapped(self, seq_id: int) -> None:
        """A sequence on the host has ended: its host blocks are free."""
        for host_block in self._host.free(seq_id):
            self.pool.moves.cancel_into_host(host_block)

    def block_map(self) -> BlockMap:
        """Which block is in whose table now. O(pool): for pictures, not for steps."""
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
            elif self.pool.refs.num_holders(block):
                mapped = MappedBlock("held", is_cached=is_cached)
            else:
                kind = "cached" if is_cached else "free"
                mapped = MappedBlock(kind, (), size * is_cached, is_cached)
            blocks.append(mapped)
        return BlockMap(block_size=size, blocks=tuple(blocks))

    def check_integrity(self) -> None:
        """Tables, held blocks, copies, cache and host blocks account for everything, once."""
        in_tables = Counter(block for table in self._tables.values() for block in table.block_ids)
        self.pool.check_integrity(in_tables)
        self._host.check_integrity()
        assert not self._tables.keys() & self._host.tables.keys(), "on the device and on the host"
        size = self.cache.block_size
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            assert table.num_stored <= len(table.block_ids) * size, (seq_id, table)
            for block, num_filled in zip(table.block_ids, self._fills(table), strict=True):
                assert filled.setdefault(block, num_filled) == num_filled, (seq_id, block, filled)
            self._check_writable(seq_id, table, in_tables)
            self._check_chain(seq_id, table)
        assert self.pool.num_slots_in_use == sum(filled.values()), filled

    def _check_new(self, seq_id: int) -> None:
        """A sequence is opened or forked to once."""
        assert seq_id not in self._tables, f"sequence {seq_id} has a table"
        assert seq_id not in self._host.tables, f"sequence {seq_id} is swapped out"

    def _fills(self, table: BlockTable) -> list[int]:
        """Slots filled, block by block."""
        size, stored = self.cache.block_size, table.num_stored
        num_full = stored // size
        fills = [size] * num_full + [0] * (len(table.block_ids) - num_full)
        if stored % size:
            fills[num_full] = stored % size
        return fills

    def _shared_to_write(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Indices of the blocks that the next tokens fall into and that other tables have too."""
        size = self.cache.block_size
        first, end = table.num_stored // size, self.cache.blocks_for(table.num_stored + num_tokens)
        return [
            index
            for index in range(first, min(end, len(table.block_ids)))
            if self.pool.num_tables(table.block_ids[index]) > 1
        ]

    def _cache_blocks(self, table: BlockTable, token_ids: Seq[int], until_step: int | None) -> None:
        """Enters the full blocks of known tokens into the cache, as far as the chain goes."""
        if table.generation != self._prefixes.generation:
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
                if self.pool.num_tables(block) > 1:
                    end = (table.num_stored // size + 1) * size  # asks again when that is full
                    break  # the tables that share it must go on having the same ancestors
                block_ids[table.num_cached] = entry.block
                self.pool.incref(entry.block, size)
                self.pool.decref((block,), (size,), until_step=until_step)
            table.num_cached += 1
            table.parent = entry
        if block_ids != list(table.block_ids):
            table.block_ids = tuple(block_ids)
        table.cache_at = end

    def _filled_blocks(self, seq_ids: Iterable[int]) -> dict[int, None]:
        """The group's blocks that hold something, each once, in order."""
        blocks: dict[int, None] = {}
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            blocks.update(dict.fromkeys(table.block_ids[:num_filled]))
        return blocks

    def _to_host(self, block: int) -> int:
        """The host block that will hold what this block holds."""
        moves = self.pool.moves
        host_block = moves.host_source(block)
        if host_block is not None:
            return self._host.keep(host_block)
        host_block = self._host.allocate()
        moves.swap_out(block, host_block)
        return host_block

    def _take_cached(self, table: SwappedTable) -> list[int]:
        """The leading blocks of a swapped table that the cache still has, now in one more table."""
        block_ids: list[int] = []
        for swapped in table.blocks:
            if swapped.entry is None or not swapped.is_on_device:
                break
            self.pool.incref(swapped.entry.block, self.cache.block_size)
            block_ids.append(swapped.entry.block)
        return block_ids

    def _check_writable(self, seq_id: int, table: BlockTable, in_tables: Counter[int]) -> None:
        size = self.cache.block_size
        for position in range(table.num_stored, table.num_writable):
            block = table.block_ids[position // size]
            assert in_tables[block] == 1, f"{seq_id} may write the shared {block}"
            assert self._prefixes.entry(block) is None, f"{seq_id} may write the cached {block}"

    def _check_chain(self, seq_id: int, table: BlockTable) -> None:
        """A table with a cached block has its ancestors: that keeps eviction simple."""
        parent: CachedBlock | Namespace | None = table.namespace
        for index, block in enumerate(table.block_ids):
            entry = self._prefixes.entry(block)
            if entry is not None:
                assert parent is not None and entry.parent == parent, (seq_id, block, entry)
            is_current = table.generation == self._prefixes.generation
            assert index >= table.num_cached or not is_current or entry, (seq_id, block)
            parent = entry
