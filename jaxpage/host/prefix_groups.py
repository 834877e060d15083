"""Which decoding rows begin with the same blocks, so that these can be read once for all of them.

Reads tables, changes no plan: without the groups a step computes the same.

    block_size 16, MIN_SHARED_TOKENS 64      tables     groups
    row 0   samples of one prompt            1 2 3 4 5 6 7        rows 0 1, 6 blocks
    row 1                                    1 2 3 4 5 6 8
    row 2   another prompt                   9 ...
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxpage.host.plan import PlannedRow, PrefixGroup
from jaxpage.host.sequence import Sequence, SharedPrefix

MIN_SHARED_TOKENS = 64
"""Below it the second pass over the own part, and the merging of the two, cost more than reading
the shared part once saves; a guess until it is measured on each device."""
_MOST_GROUPS_A_BUCKET = 4


def find_prefix_groups(
    rows: Seq[PlannedRow], parts: Seq[tuple[Sequence, int]], block_size: int
) -> tuple[PrefixGroup, ...]:
    """Disjoint groups of at least two rows of one token, at the plan's own row numbers.

    Tables that agree at one index agree before it: blocks are shared as prefixes only. Costs one
    look at a row, and one comparison of tables where one of them has changed.
    """
    last_shared = -(-MIN_SHARED_TOKENS // block_size) - 1
    buckets: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.num_tokens > 1 or row.prompt_targets:
            break
        if row.start >= MIN_SHARED_TOKENS and len(row.block_ids) > last_shared:
            buckets.setdefault(row.block_ids[last_shared], []).append(index)
    found: list[PrefixGroup] = []
    if len(buckets) == len(rows):
        return ()
    for bucket in buckets.values():
        for _ in range(_MOST_GROUPS_A_BUCKET):
            if len(bucket) < 2:
                break
            lead = rows[bucket[0]].block_ids
            shared = [
                (_num_shared(parts[index][0], rows[index].block_ids, lead), index)
                for index in bucket
            ]
            best = _best_cut(shared)
            found.append(best)
            bucket = sorted(set(bucket).difference(best.rows))
    return tuple(found)


def _best_cut(shared: list[tuple[int, int]]) -> PrefixGroup:
    """The rows that together save most: those that share much, or more of those that share less."""
    shared.sort(key=lambda entry: (-entry[0], entry[1]))
    count = max(range(2, len(shared) + 1), key=lambda n: (n - 1) * shared[n - 1][0])
    return PrefixGroup(
        rows=tuple(sorted(index for _, index in shared[:count])), num_blocks=shared[count - 1][0]
    )


def _num_shared(sequence: Sequence, table: tuple[int, ...], lead: tuple[int, ...]) -> int:
    """Leading blocks that are the same, remembered until one of the two tables changes."""
    known = sequence.shared
    if known is not None and known.table is table and known.other is lead:
        return known.num_blocks
    length = min(len(table), len(lead))
    num_blocks = length
    if table[:length] != lead[:length]:
        num_blocks = next(i for i in range(length) if table[i] != lead[i])
    sequence.shared = SharedPrefix(table, lead, num_blocks)
    return num_blocks
