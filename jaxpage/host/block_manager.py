"""Which blocks each sequence owns, shares, finds in the prefix cache or has on the host.

Decides nothing. One plan, in the order of calls:

    plan n is made         match, open, prepare_write, swap_out, swap_in, release   in any order
    plan n is dispatched   take_moves: what plan n carries; then store of each row;
                           then fork of what drew several tokens, release of what has ended
    plan n is read         step_read(n)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxpage.config import CacheConfig
from jaxpage.host.block_table import BlockTable
from jaxpage.host.block_tables import BlockTables
from jaxpage.host.plan import BlockMoves
from jaxpage.host.prefix_cache import (
    CachedBlock,
    HashTokens,
    PrefixHit,
    Space,
    hash_tokens,
    salted,
)
from jaxpage.host.swap_pool import SwappedBlock, SwappedTable, SwapPool
from jaxpage.outputs import BlockMap, MappedBlock


class BlockManager(BlockTables):
    """The tables, and around them what is not in a table: cached prefixes and host blocks."""

    def __init__(
        self,
        cache: CacheConfig,
        *,
        enable_prefix_caching: bool = False,
        hash_tokens: HashTokens = hash_tokens,
    ) -> None:
        """`hash_tokens`: any function will do; it is made for tests of clashes."""
        super().__init__(
            cache, enable_prefix_caching=enable_prefix_caching, hash_tokens=hash_tokens
        )
        self._host = SwapPool(cache.num_swap_blocks)

    @property
    def num_host_free(self) -> int:
        """Host blocks that nothing waits in."""
        return self._host.num_free

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

    def take_moves(self) -> BlockMoves:
        """All moves of the plan that is dispatched now, and of no other plan."""
        self._host.plan_made()
        return self._ledger.take_moves()

    def reset_prefix_cache(self) -> None:
        """Nothing filled before now is ever found again."""
        self._ledger.reset_cache()

    def num_to_swap_out(self, seq_ids: Iterable[int]) -> int:
        """Blocks that `swap_out` moves: the filled ones of the gang, a shared block once."""
        return len(self._filled_blocks(seq_ids))

    def can_swap_out(self, seq_ids: Iterable[int]) -> bool:
        return self.num_to_swap_out(seq_ids) <= self._host.num_free

    def swap_out(self, seq_ids: Iterable[int], *, until_step: int | None) -> int:
        """Moves a gang's tables to the host; returns the number of host blocks they fill.

        Everything that is filled is copied, cached blocks and blocks that others share too: what
        stays on the device may be evicted or given back before the gang returns.

        `until_step`: None frees the device blocks for the plan being made. That is safe with an
        unread step in flight: the plan's moves run after that step's writes and before whatever
        writes the blocks next, and its results are the host's to keep. A step id holds them.
        """
        gang = tuple(seq_ids)
        host_blocks = {block: self._to_host(block) for block in self._filled_blocks(gang)}
        for seq_id in gang:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            swapped = SwappedTable(
                blocks=tuple(
                    SwappedBlock(host_blocks[block], self._prefixes.entry(block))
                    for block in table.block_ids[:num_filled]
                ),
                num_stored=table.num_stored,
                space=table.space,
                epoch=table.epoch,
            )
            self._host.put(seq_id, swapped)
        for seq_id in gang:
            self.release(seq_id, until_step=until_step)
        return len(host_blocks)

    def is_swapped(self, seq_id: int) -> bool:
        return seq_id in self._host.tables

    def host_table(self, seq_id: int) -> tuple[int, ...]:
        """The host blocks of a sequence that waits there, in logical order."""
        return tuple(swapped.host_block for swapped in self._host.tables[seq_id].blocks)

    def num_needed_to_swap_in(self, seq_ids: Iterable[int]) -> int:
        """Blocks of num_free that `swap_in` takes."""
        needed: set[tuple[str, int]] = set()
        for seq_id in seq_ids:
            for swapped in self._host.tables[seq_id].blocks:
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
        tables = {seq_id: self._host.pick_up(seq_id) for seq_id in seq_ids}
        ledger, size = self._ledger, self.cache.block_size
        shown = {seq_id: self._show_cached(table) for seq_id, table in tables.items()}
        device: dict[int, int] = {}  # host block: device block
        for seq_id, table in tables.items():
            block_ids = shown[seq_id]
            num_cached = len(block_ids)
            for swapped in table.blocks[len(block_ids) :]:
                filled = min(table.num_stored - len(block_ids) * size, size)
                if swapped.host_block in device:
                    ledger.show(device[swapped.host_block], filled)
                else:
                    device[swapped.host_block] = ledger.take()
                    ledger.num_slots_in_use += filled
                    ledger.moves.swap_in(swapped.host_block, device[swapped.host_block])
                block_ids.append(device[swapped.host_block])
            self._tables[seq_id] = self._returned(table, tuple(block_ids), num_cached)
        return len(device)

    def drop_swapped(self, seq_id: int) -> None:
        """A sequence on the host has ended: its host blocks are free."""
        for host_block in self._host.drop(seq_id):
            self._ledger.moves.cancel_into_host(host_block)

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
        self._ledger.check_integrity(shown)
        self._host.check_integrity()
        assert not self._tables.keys() & self._host.tables.keys(), "on the device and on the host"
        size = self.cache.block_size
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            assert table.num_stored <= len(table.block_ids) * size, (seq_id, table)
            for block, num_filled in zip(table.block_ids, self._fills(table), strict=True):
                assert filled.setdefault(block, num_filled) == num_filled, (seq_id, block, filled)
            self._check_own(seq_id, table, shown)
            self._check_chain(seq_id, table)
        assert self.num_slots_in_use == sum(filled.values()), (self.num_slots_in_use, filled)

    def _check_new(self, seq_id: int) -> None:
        super()._check_new(seq_id)
        assert seq_id not in self._host.tables, f"sequence {seq_id} is swapped out"

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

    def _filled_blocks(self, seq_ids: Iterable[int]) -> dict[int, None]:
        """The gang's blocks that hold something, each once, in order."""
        blocks: dict[int, None] = {}
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            num_filled = self.cache.blocks_for(table.num_stored)
            blocks.update(dict.fromkeys(table.block_ids[:num_filled]))
        return blocks

    def _to_host(self, block: int) -> int:
        """The host block that will hold what this block holds."""
        moves = self._ledger.moves
        host_block = moves.host_source(block)
        if host_block is not None:
            return self._host.keep(host_block)
        host_block = self._host.allocate()
        moves.swap_out(block, host_block)
        return host_block

    def _show_cached(self, table: SwappedTable) -> list[int]:
        """Shows the leading blocks of a swapped table that the cache still has."""
        block_ids: list[int] = []
        for swapped in table.blocks:
            if swapped.entry is None or not swapped.is_on_device:
                break
            self._ledger.show(swapped.entry.block, self.cache.block_size)
            block_ids.append(swapped.entry.block)
        return block_ids

    def _returned(
        self, table: SwappedTable, block_ids: tuple[int, ...], num_cached: int
    ) -> BlockTable:
        last = table.blocks[num_cached - 1].entry if num_cached else None
        return BlockTable(
            block_ids=block_ids,
            num_stored=table.num_stored,
            num_writable=table.num_stored,
            num_cached=num_cached,
            cache_at=(num_cached + 1) * self.cache.block_size,
            parent=last or table.space,
            space=table.space,
            epoch=table.epoch,
        )
