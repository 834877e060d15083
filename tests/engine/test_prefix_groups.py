"""Which rows share leading blocks: by tables written out by hand, and against a plain search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile
from random import Random

import pytest

from jaxpage.engine.prefix_groups import MIN_SHARED_TOKENS, Agreement, PrefixGroup, PrefixGroups
from jaxpage.host.plan import PlannedRow, StepPlan
from tests.host.driver import Driver, engine, prompt
from tests.host.fake import beam_request, request

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
    rows = [
        row(
            index,
            table,
            num_tokens=2 if index in long else 1,
            start=starts.get(index, len(table) * SIZE - 2),
            targets=(1,) if index in scored else (),
        )
        for index, table in enumerate(tables)
    ]
    return PrefixGroups(SIZE).find(plan_of(rows))


def plan_of(rows: Seq[PlannedRow]) -> StepPlan:
    num_packed = sum(row.num_tokens > 1 or bool(row.prompt_targets) for row in rows)
    return StepPlan(1, tuple(rows), num_single=len(rows) - num_packed)


def row(
    seq_id: int, table: Table, *, start: int, num_tokens: int = 1, targets: tuple[int, ...] = ()
) -> PlannedRow:
    token_ids = (1,) * num_tokens
    return PlannedRow(seq_id, token_ids, None, start, num_tokens, table, 1, (), targets)


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
    groups = PrefixGroups(SIZE)

    def num_shared(lead: Table, table: Table) -> int:
        tables = ((1, lead), (2, table))
        rows = [row(seq_id, each, start=len(each) * SIZE - 1) for seq_id, each in tables]
        (group,) = groups.find(plan_of(rows))
        return group.num_blocks

    assert num_shared(lead, table) == LEAST
    assert groups._known[2] == Agreement(table, lead, LEAST)
    groups._known[2] = Agreement(table, lead, LEAST - 1)
    assert num_shared(lead, table) == LEAST - 1  # not looked at again
    grown = (*HEAD, 5, 91)
    assert num_shared(lead, grown) == LEAST + 1
    assert num_shared((*HEAD, 92), grown) == LEAST


def test_what_is_remembered_of_finished_sequences_is_forgotten() -> None:
    groups = PrefixGroups(SIZE)
    for first in range(0, 10_000, 2):
        rows = [row(first + i, (*HEAD, 90 + i), start=len(HEAD) * SIZE) for i in (0, 1)]
        assert groups.find(plan_of(rows)) == (PrefixGroup((0, 1), LEAST),)
        assert len(groups._known) <= 64


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


def groups_of(driver: Driver) -> list[tuple[PrefixGroup, ...]]:
    """Those of all its plans, each held against the tables it speaks of."""
    finder, size = PrefixGroups(driver.cache.block_size), driver.cache.block_size
    found = [finder.find(plan) for plan in driver.plans]
    for plan, groups in zip(driver.plans, found, strict=True):
        grouped = [index for group in groups for index in group.rows]
        assert len(set(grouped)) == len(grouped), "a row in two groups"
        for group in groups:
            tables = {plan.rows[index].block_ids[: group.num_blocks] for index in group.rows}
            assert len(tables) == 1 and len(group.rows) >= 2 and group.num_blocks >= 1
            assert max(group.rows) < plan.num_single
            assert all(plan.rows[i].start >= group.num_blocks * size for i in group.rows)
    return found


def test_samples_share_the_blocks_of_their_prompt() -> None:
    driver = engine(depth=0, num_blocks=200, block_size=16)
    driver.add(request("a", prompt(100), n=4, temperature=1.0, max_tokens=3))
    driver.add(request("b", prompt(100, 5), max_tokens=3))
    driver.run()
    assert groups_of(driver)[1] == (PrefixGroup((0, 1, 2, 3), 6),)


@pytest.mark.parametrize("num_blocks", [60, 200])
def test_groups_of_crowded_plans_say_what_their_tables_say(num_blocks: int) -> None:
    """Samples, beams and cached prompts; in the smaller pool some are preempted and come back."""
    driver = engine(
        num_blocks=num_blocks,
        block_size=8,
        num_swap_blocks=40,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
    )
    for index in range(4):
        head = prompt(70 + 20 * (index % 2))
        name, params = str(index), {"n": 1 + index, "temperature": 1.0, "max_tokens": 24}
        driver.add(request(name, [*head, index], seed=index, **params))
        driver.add(beam_request(f"beam {name}", [*head, 9, index], 1 + index, max_tokens=16))
        driver.step()
    driver.run()
    assert sum(map(len, groups_of(driver))) > 20
    counters = driver.scheduler.counters
    is_crowded = counters.preemptions_recompute + counters.preemptions_swap > 0
    assert is_crowded == (num_blocks == 60)


def common(tables: Seq[Table]) -> int:
    return len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))))
