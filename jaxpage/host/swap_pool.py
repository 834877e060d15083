"""The host's own blocks, where preempted sequences wait, and which blocks each of them has there.

Knows sequence ids and block ids, no tokens. A host block is shared as its device block was.

    swapped    1: host blocks (0 1)     2: host blocks (0 2)     holders of 0 1 2:  2 1 1
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jaxpage.host.plan import Namespace
from jaxpage.host.prefix_cache import CachedBlock


@dataclass(frozen=True, slots=True)
class SwappedBlock:
    """A block's content on the host, and the entry under which it may still be on the device."""

    host_block: int
    entry: CachedBlock | None

    @property
    def is_on_device(self) -> bool:
        return self.entry is not None and self.entry.is_cached


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """A table that waits on the host."""

    blocks: tuple[SwappedBlock, ...]
    num_stored: int
    namespace: Namespace
    generation: int | None


class SwapPool:
    """Reference counts of host blocks 0 to num_blocks - 1, and the tables that hold them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tables: dict[int, SwappedTable] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: low ids first
        self._num_holders: dict[int, int] = {}
        self._free_after_plan: list[int] = []
        self._read: set[int] = set()  # by the plan being made

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A host block without a holder until `put`. One must be free."""
        assert self._free, f"all {self.num_blocks} host blocks are in use"
        block = self._free.pop()
        self._num_holders[block] = 0
        return block

    def keep(self, block: int) -> int:
        """A host block that the plan being made reads, kept with its content for `put`."""
        if block not in self._num_holders:
            self._free_after_plan.remove(block)
            self._num_holders[block] = 0
        return block

    def put(self, seq_id: int, table: SwappedTable) -> None:
        """The sequence waits here: one more holder of each of its host blocks."""
        assert seq_id not in self.tables, f"sequence {seq_id} is swapped out already"
        self.tables[seq_id] = table
        for swapped in table.blocks:
            self._num_holders[swapped.host_block] += 1

    def take(self, seq_id: int) -> SwappedTable:
        """The sequence goes back: the plan being made reads its host blocks, then they are free."""
        table = self.tables.pop(seq_id)
        self._read.update(swapped.host_block for swapped in table.blocks)
        self._free_after_plan += self._decref(table)
        return table

    def free(self, seq_id: int) -> list[int]:
        """The sequence has ended; returns the host blocks that are free by it."""
        blocks = self._decref(self.tables.pop(seq_id))
        self._free_after_plan += [block for block in blocks if block in self._read]
        free_now = [block for block in blocks if block not in self._read]
        self._free += free_now
        return free_now

    def plan_made(self) -> None:
        """The next plan may write what this one reads."""
        self._free += self._free_after_plan
        self._free_after_plan.clear()
        self._read.clear()

    def check_integrity(self) -> None:
        """Each host block is free, held by the tables that name it, or free after this plan."""
        holders = Counter(
            swapped.host_block for table in self.tables.values() for swapped in table.blocks
        )
        assert dict(holders) == self._num_holders, (holders, self._num_holders)
        everything = sorted((*self._free, *self._free_after_plan, *self._num_holders))
        assert everything == list(range(self.num_blocks)), everything

    def _decref(self, table: SwappedTable) -> list[int]:
        """One holder less of each; returns those that have none left, tail first."""
        unheld: list[int] = []
        for swapped in reversed(table.blocks):
            self._num_holders[swapped.host_block] -= 1
            if not self._num_holders[swapped.host_block]:
                del self._num_holders[swapped.host_block]
                unheld.append(swapped.host_block)
        return unheld
