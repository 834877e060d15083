"""The waiting queue against a sorted list: which is first, which left, which came back."""

from __future__ import annotations

from random import Random

import pytest

from jaxpage.host.policy import rank
from jaxpage.host.queues import WaitingQueue
from jaxpage.host.sequence import SequenceGroup, new_group
from tests.host.fake import request


def group(arrival: int, priority: int = 0) -> SequenceGroup:
    return new_group(request(str(arrival), [1], priority=priority), arrival, 9)


def drained(queue: WaitingQueue) -> list[int]:
    arrivals: list[int] = []
    while (first := queue.first()) is not None:
        arrivals.append(first.arrival)
        queue.remove(first)
    return arrivals


def test_the_first_is_of_the_lowest_priority_then_the_oldest() -> None:
    queue = WaitingQueue()
    for each in (group(3), group(1), group(4, priority=-1), group(2, priority=1)):
        queue.push(each)
    assert len(queue) == 4
    assert drained(queue) == [4, 1, 3, 2]
    assert queue.first() is None and len(queue) == 0


def test_looking_at_the_first_takes_none_out() -> None:
    queue, only = WaitingQueue(), group(1)
    queue.push(only)
    assert queue.first() is queue.first() is only
    assert only.is_waiting and len(queue) == 1


def test_one_that_leaves_from_the_middle_is_neither_served_nor_listed() -> None:
    queue, groups = WaitingQueue(), [group(arrival) for arrival in range(1, 6)]
    for each in groups:
        queue.push(each)
    for each in (groups[2], groups[0]):
        queue.remove(each)
        assert not each.is_waiting
    assert len(queue) == 3
    assert sorted(each.arrival for each in queue) == [2, 4, 5]
    assert drained(queue) == [2, 4, 5]


def test_one_that_comes_back_while_its_old_entry_is_still_inside_counts_once() -> None:
    queue, groups = WaitingQueue(), [group(arrival) for arrival in (1, 2, 3)]
    for each in groups:
        queue.push(each)
    for _ in range(3):
        queue.remove(groups[1])
        queue.push(groups[1])
    assert len(queue) == 3
    assert sorted(each.arrival for each in queue) == [1, 2, 3]
    assert drained(queue) == [1, 2, 3]


def test_none_waits_twice_and_only_one_that_waits_can_leave() -> None:
    queue, one = WaitingQueue(), group(1)
    with pytest.raises(AssertionError, match="does not wait: 1"):
        queue.remove(one)
    queue.push(one)
    with pytest.raises(AssertionError, match="waits already: 1"):
        queue.push(one)
    assert len(queue) == 1


@pytest.mark.parametrize("seed", range(5))
def test_any_coming_and_going_is_that_of_a_sorted_list(seed: int) -> None:
    random, queue = Random(seed), WaitingQueue()
    away = [group(arrival, priority=arrival % 3) for arrival in range(1, 31)]
    inside: list[SequenceGroup] = []
    for _ in range(400):
        if away and (not inside or random.random() < 0.5):
            come = away.pop(random.randrange(len(away)))
            queue.push(come)
            inside.append(come)
        else:
            leave = inside.pop(random.randrange(len(inside)))
            queue.remove(leave)
            away.append(leave)
        assert queue.first() is min(inside, key=rank, default=None)
        assert len(queue) == len(inside)
        assert sorted(map(rank, queue)) == sorted(map(rank, inside))
