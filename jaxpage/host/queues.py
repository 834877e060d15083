"""The groups that wait and the groups that run, both in order of rank.

Knows ranks only. Thousands may wait and any may leave: a group that is taken out stays in the heap,
marked, until it comes to the top, so nothing costs more than the logarithm of how many wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush

from jaxpage.host.policy import rank
from jaxpage.host.sequence import SequenceGroup


class Queues:
    """A group waits, or runs, or is in neither while its last steps are read."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: list[SequenceGroup] = []
        """In order of rank."""

    def start(self, group: SequenceGroup) -> None:
        """From waiting to running."""
        self.waiting.remove(group)
        insort(self.running, group, key=rank)
        group.is_running = True

    def stop(self, group: SequenceGroup) -> None:
        """From running to neither."""
        self.running.remove(group)
        group.is_running = False

    def remove(self, group: SequenceGroup) -> None:
        """From wherever it is to neither."""
        if group.is_waiting:
            self.waiting.remove(group)
        elif group.is_running:
            self.stop(group)


class WaitingQueue:
    """Groups by rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, SequenceGroup]] = []
        self._entry: dict[int, int] = {}  # arrival: the entry that counts
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All of them, in no order: for checks."""
        return (group for _, entry, group in self._heap if self._entry.get(group.arrival) == entry)

    def push(self, group: SequenceGroup) -> None:
        assert not group.is_waiting, f"waits already: {group.request.request_id}"
        group.is_waiting = True
        self._num_entries += 1
        self._entry[group.arrival] = self._num_entries
        heappush(self._heap, (rank(group), self._num_entries, group))

    def first(self) -> SequenceGroup | None:
        """The group that is served next."""
        while self._heap:
            _, entry, group = self._heap[0]
            if self._entry.get(group.arrival) == entry:
                return group
            heappop(self._heap)
        return None

    def remove(self, group: SequenceGroup) -> None:
        assert group.is_waiting, f"does not wait: {group.request.request_id}"
        group.is_waiting = False
        del self._entry[group.arrival]
