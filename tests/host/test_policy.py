"""Which group comes first, which is preempted and how, and how much room is kept."""

from __future__ import annotations

import pytest

from jaxpage.host import policy
from jaxpage.host.sequence import SequenceGroup, new_group
from tests.host.fake import request


def group(
    arrival: int, *, priority: int = 0, num_preemptions: int = 0, n: int = 1
) -> SequenceGroup:
    made = new_group(
        request(str(arrival), [1], n=n, temperature=1.0, priority=priority), arrival, 9
    )
    made.num_preemptions = num_preemptions
    return made


def test_lower_priority_first_then_first_come_and_the_last_is_preempted() -> None:
    groups = sorted(
        (group(1, priority=2), group(3), group(2), group(4, priority=-1)), key=policy.rank
    )
    assert [entry.arrival for entry in groups] == [4, 2, 3, 1]
    assert policy.choose_victim(groups).arrival == 1


def test_every_running_row_has_a_block_to_grow_into() -> None:
    assert [policy.reserved_blocks(num_running, group(1)) for num_running in (0, 1, 5)] == [0, 2, 6]
    assert policy.reserved_blocks(5, group(1, n=4)) == 9


def test_a_preempted_group_waits_for_more() -> None:
    counts = [policy.reserved_blocks(3, group(1, num_preemptions=count)) for count in (0, 1, 2, 9)]
    assert counts == [4, 8, 16, 64]
    assert policy.reserved_blocks(0, group(1, num_preemptions=9)) == 0


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "is_swap"),
    [(10, 160, True), (10, 60, False), (10, 0, False), (1000, 16000, True)],
)
def test_bytes_both_ways_against_tokens(num_blocks: int, num_tokens: int, is_swap: bool) -> None:
    """8 MiB a block at 25 GB/s is 0.67 ms there and back; 0.1 ms a token."""
    costs = policy.PreemptionCosts()
    assert costs.is_swap_cheaper(num_blocks=num_blocks, num_tokens=num_tokens) == is_swap
