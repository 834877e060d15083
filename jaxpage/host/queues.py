"""The groups that wait, in order of rank, where thousands may wait and any may leave.

Knows ranks only. Who is taken out stays in the heap, marked, until it comes to the top: nothing
costs more than the logarithm of how many wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from jaxpage.host.policy import rank
from jaxpage.host.sequence import SequenceGroup


class WaitingQueue:
    """Groups by rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, SequenceGroup]] = []
        self._entry: dict[int, int] = {}  # arrival: the entry that counts
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry)

    def push(self, group: SequenceGroup) -> None:
        assert not group.is_queued, f"waits already: {group.request.request_id}"
        group.is_queued = True
        self._num_entries += 1
        self._entry[group.arrival] = self._num_entries
        heappush(self._heap, (rank(group), self._num_entries, group))

    def first(self) -> SequenceGroup | None:
        """Who is served next."""
        while self._heap:
            _, entry, group = self._heap[0]
            if self._entry.get(group.arrival) == entry:
                return group
            heappop(self._heap)
        return None

    def remove(self, group: SequenceGroup) -> None:
        assert group.is_queued, f"does not wait: {group.request.request_id}"
        group.is_queued = False
        del self._entry[group.arrival]

    def __iter__(self) -> Iterator[SequenceGroup]:
        """In no order, all of them: for checks."""
        return (group for _, entry, group in self._heap if self._entry.get(group.arrival) == entry)
