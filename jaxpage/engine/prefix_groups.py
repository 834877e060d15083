"""Which decoding rows begin with the same blocks, so that these can be read once for all of them.

Reads block tables, changes no plan: without the groups a step computes the same.

    block_size 16, MIN_SHARED_TOKENS 64      tables     groups
    row 0   samples of one prompt            1 2 3 4 5 6 7        rows 0 1, 6 blocks
    row 1                                    1 2 3 4 5 6 8
    row 2   another prompt                   9 ...
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.host.plan import PlannedRow, StepPlan

MIN_SHARED_TOKENS = 64
"""Below it the second pass over the own part, and the merging of the two, cost more than reading
the shared part once saves; a guess until it is measured on each device."""
_MOST_GROUPS_A_BUCKET = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of one step whose first `num_blocks` blocks are the same."""

    rows: tuple[int, ...]
    num_blocks: int


class Agreement(NamedTuple):
    """Two tables, told apart by identity, and how many of their leading blocks are the same."""

    table: tuple[int, ...]
    other: tuple[int, ...]
    num_blocks: int


class PrefixGroups:
    """Finds the groups of plans; keeps how far two tables agree until one of them changes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[int, Agreement] = {}  # by sequence id

    def find(self, plan: StepPlan) -> tuple[PrefixGroup, ...]:
        """Disjoint groups of at least two of the plan's single rows, by their place in the plan.

        Tables that agree at one index agree before it: blocks are shared as prefixes only. Costs
        one look at a row, and one comparison of tables where one of them has changed.
        """
        rows = plan.rows
        last_shared = -(-MIN_SHARED_TOKENS // self._block_size) - 1
        buckets: dict[int, list[int]] = {}
        for index, row in enumerate(rows[: plan.num_single]):
            if row.start >= MIN_SHARED_TOKENS and len(row.block_ids) > last_shared:
                buckets.setdefault(row.block_ids[last_shared], []).append(index)
        found: list[PrefixGroup] = []
        for bucket in buckets.values():
            for _ in range(_MOST_GROUPS_A_BUCKET):
                if len(bucket) < 2:
                    break
                first = rows[bucket[0]].block_ids
                shared = [(self._num_shared(rows[index], first), index) for index in bucket]
                best = _best_cut(shared)
                found.append(best)
                bucket = sorted(set(bucket).difference(best.rows))
        if len(self._known) > 4 * max(16, len(rows)):  # most sequences have finished
            seq_ids = {row.seq_id for row in rows}
            self._known = {i: known for i, known in self._known.items() if i in seq_ids}
        return tuple(found)

    def _num_shared(self, row: PlannedRow, other: tuple[int, ...]) -> int:
        """Leading blocks of the row's table that are the same in the other one."""
        table, known = row.block_ids, self._known.get(row.seq_id)
        if known is not None and known.table is table and known.other is other:
            return known.num_blocks
        num_blocks = min(len(table), len(other))
        if table[:num_blocks] != other[:num_blocks]:
            num_blocks = next(i for i in range(num_blocks) if table[i] != other[i])
        self._known[row.seq_id] = Agreement(table, other, num_blocks)
        return num_blocks


def _best_cut(shared: Seq[tuple[int, int]]) -> PrefixGroup:
    """The rows that together save most reads; `shared`: (blocks shared, row) of each."""
    most_first = sorted(shared, key=lambda entry: (-entry[0], entry[1]))
    count = max(range(2, len(shared) + 1), key=lambda n: (n - 1) * most_first[n - 1][0])
    return PrefixGroup(
        rows=tuple(sorted(index for _, index in most_first[:count])),
        num_blocks=most_first[count - 1][0],
    )
