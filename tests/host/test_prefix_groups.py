"""Which rows share leading blocks: by tables written out by hand, and against a plain search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile
from random import Random

import pytest

from jaxpage.host.plan import PlannedRow, PrefixGroup
from jaxpage.host.prefix_groups import MIN_SHARED_TOKENS, find_prefix_groups
from jaxpage.host.sequence import Sequence, SharedPrefix, new_group
from tests.host.fake import request

SIZE = 16
LEAST = MIN_SHARED_TOKENS // SIZE
"""Fewest blocks that are worth sharing."""
HEAD = tuple(range(1, LEAST + 1))
Table = tuple[int, ...]


def find(
    tables: Seq[Table], *, long: Seq[int] = (), scored: Seq[int] = (), start_of_1: int | None = None
) -> tuple[PrefixGroup, ...]:
    """The groups of rows with these tables; a row is in the last block of its table."""
    starts = {} if start_of_1 is None else {1: start_of_1}
    parts = [(sequence(index), 2 if index in long else 1) for index in range(len(tables))]
    rows = [
        row(
            table,
            num_tokens=parts[index][1],
            start=starts.get(index, len(table) * SIZE - 2),
            targets=(1,) if index in scored else (),
        )
        for index, table in enumerate(tables)
    ]
    return find_prefix_groups(rows, parts, SIZE)


def sequence(seq_id: int) -> Sequence:
    return new_group(request(str(seq_id), [1]), seq_id, 9).lead


def row(
    table: Table, *, start: int, num_tokens: int = 1, targets: tuple[int, ...] = ()
) -> PlannedRow:
    token_ids = (1,) * num_tokens
    return PlannedRow(1, token_ids, None, start, num_tokens, table, 1, (), targets)


def test_rows_share_up_to_the_first_block_that_differs() -> None:
    tables = [(*HEAD, 5, 6, 7), (*HEAD, 5, 6, 8), (9, 10, 11, 12, 13)]
    assert find(tables) == (PrefixGroup(rows=(0, 1), num_blocks=LEAST + 2),)


def test_two_prompts_make_two_groups_with_the_rows_numbers_of_the_plan() -> None:
    other = tuple(block + 100 for block in HEAD)
    tables = [(*HEAD, 5), (*other, 105), (*HEAD, 6), (*other, 106), (300,) * (LEAST + 1)]
    assert find(tables) == (PrefixGroup((0, 2), LEAST), PrefixGroup((1, 3), LEAST))


def test_many_that_share_less_go_before_two_that_share_more() -> None:
    """Rows 0 and 1 share 7 blocks: 7 reads saved. All three share 4: 8 saved."""
    tables = [(*HEAD, 5, 6, 7, 90), (*HEAD, 5, 6, 7, 91), (*HEAD, 92)]
    assert find(tables) == (PrefixGroup((0, 1, 2), LEAST),)


def test_two_that_share_much_leave_the_others_to_a_group_of_their_own() -> None:
    """Rows 0 and 2 share 24 blocks, saving 24; all four share 4, saving 12."""
    long = (*HEAD, *range(50, 70))
    tables = [(*long, 90), (*HEAD, 91), (*long, 92), (*HEAD, 93)]
    assert find(tables) == (PrefixGroup((0, 2), len(long)), PrefixGroup((1, 3), LEAST))


def test_a_part_too_short_to_pay_is_not_shared() -> None:
    short = HEAD[:-1]
    assert find([(*short, 90, 91), (*short, 92, 93)]) == ()
    assert find([(*HEAD, 91), (*HEAD, 93)]) == (PrefixGroup((0, 1), LEAST),)


def test_a_row_that_has_not_come_so_far_is_left_out() -> None:
    tables = [(*HEAD, 90), (*HEAD, 91), (*HEAD, 92)]
    assert find(tables, start_of_1=MIN_SHARED_TOKENS - 1) == (PrefixGroup((0, 2), LEAST),)
    assert find(tables, start_of_1=MIN_SHARED_TOKENS) == (PrefixGroup((0, 1, 2), LEAST),)


def test_only_rows_of_one_token_that_score_nothing_are_grouped() -> None:
    tables = [(*HEAD, 90), (*HEAD, 91), (*HEAD, 92), (*HEAD, 93)]
    assert find(tables, long=(2, 3)) == find(tables, scored=(2, 3)) == (PrefixGroup((0, 1), LEAST),)
    assert find(tables, long=(0, 1, 2, 3)) == find(tables, scored=(0, 1, 2, 3)) == ()


def test_what_was_remembered_holds_for_the_same_two_tables_only() -> None:
    lead, table = (*HEAD, 5, 90), (*HEAD, 91)
    parts = [(sequence(1), 1), (sequence(2), 1)]

    def num_shared(lead: Table, table: Table) -> int:
        rows = [row(each, start=len(each) * SIZE - 1) for each in (lead, table)]
        (group,) = find_prefix_groups(rows, parts, SIZE)
        return group.num_blocks

    assert num_shared(lead, table) == LEAST
    assert parts[1][0].shared == SharedPrefix(table, lead, LEAST)
    parts[1][0].shared = SharedPrefix(table, lead, LEAST - 1)
    assert num_shared(lead, table) == LEAST - 1  # nobody looked again
    grown = (*HEAD, 5, 91)
    assert num_shared(lead, grown) == LEAST + 1
    assert num_shared((*HEAD, 92), grown) == LEAST


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_disjoint_and_share_all_that_they_say(seed: int) -> None:
    random, tables = Random(seed), [HEAD]
    for new in range(1000, 1016):  # each branches off another one
        whole = random.choice(tables)
        keep = random.randrange(len(whole) + 1)
        tables.append((*whole[:keep], *range(new * 100, new * 100 + random.randrange(1, 8))))
    tables = [(*table, 10**6 + index) for index, table in enumerate(tables)]
    groups = find(tables)
    grouped = [index for group in groups for index in group.rows]
    assert len(grouped) == len(set(grouped))
    for group in groups:
        assert len(group.rows) >= 2 and list(group.rows) == sorted(group.rows)
        assert group.num_blocks == common([tables[index] for index in group.rows]) >= LEAST
    left = [table for index, table in enumerate(tables) if index not in grouped]
    pairs = sum(common([a, b]) >= LEAST for i, a in enumerate(left) for b in left[:i])
    assert not pairs or len(groups) >= 4, (pairs, groups)


def common(tables: Seq[Table]) -> int:
    return len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))))
