"""Who waits, who runs and what they hold: the state that planning reads and writes.

Decides nothing. Sequences enter and leave their queues and give up their blocks here and nowhere
else, so that the two always agree.
"""

from __future__ import annotations

from bisect import insort

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.policy import rank
from jaxpage.host.queues import WaitingQueue
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.outputs import Counters


class Books:
    """The queues and the blocks of one scheduler."""

    def __init__(self, config: EngineConfig, cache: CacheConfig, counters: Counters) -> None:
        self.config = config
        self.cache = cache
        self.counters = counters
        self.waiting = WaitingQueue()
        self.running: list[SequenceGroup] = []  # in order of rank
        self.blocks = BlockManager(cache, enable_prefix_caching=config.enable_prefix_caching)
        self.last_planned = 0
        self.last_read = 0

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Whether a step that holds a row of the group has not been read."""
        return group.last_step > self.last_read

    def start(self, group: SequenceGroup) -> None:
        """From waiting to running."""
        self.waiting.remove(group)
        insort(self.running, group, key=rank)
        group.is_running = True

    def stop(self, group: SequenceGroup) -> None:
        """No longer running; its blocks are another matter."""
        self.running.remove(group)
        group.is_running = False

    def release(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; they are free once no step uses them."""
        until_step = sequence.last_step if sequence.last_step > self.last_read else None
        self.blocks.free(sequence.seq_id, until_step=until_step)

    def forget_blocks(self, group: SequenceGroup) -> None:
        """Everybody of the group starts anew, with the tokens he has."""
        for sequence in group.live:
            if sequence.status is Status.LEAVING:
                continue  # nothing more is asked of it
            if sequence.status is Status.RUNNING:
                self.release(sequence)
            elif sequence.status is Status.SWAPPED:
                self.blocks.free_swapped(sequence.seq_id)
            sequence.status = Status.WAITING
            sequence.num_computed = 0
            sequence.leader = sequence.candidates = None

    def leave(self, sequence: Sequence) -> None:
        """Its last step is planned: it gives up its blocks, and its seat."""
        if sequence.status is Status.RUNNING:
            self.release(sequence)
        sequence.status = Status.LEAVING
        self._stop_if_empty(sequence.group)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended, wherever it stands."""
        group, status = sequence.group, sequence.status
        if status is Status.RUNNING:
            self.release(sequence)
        elif status is Status.SWAPPED:
            self.blocks.free_swapped(sequence.seq_id)
        sequence.status = Status.ENDED
        if sequence not in group.live:
            return  # a beam's place that is not in use
        was_lead = sequence is group.lead
        group.live.remove(sequence)
        if group.is_queued and not group.live:
            self.waiting.remove(group)
        self._stop_if_empty(group)
        if any(other.leader is sequence for other in group.live) or (
            was_lead and group.is_one_row and group.live
        ):
            self._start_over(group)  # what the others were waiting for will never be computed

    def drop(self, group: SequenceGroup) -> None:
        """Takes a group out of its queue and away from its blocks."""
        if group.is_queued:
            self.waiting.remove(group)
        elif group.is_running:
            self.stop(group)
        self.forget_blocks(group)

    def check_integrity(self) -> None:
        """Queues in order and disjoint, tables exactly for the running, no slot to spare."""
        self.blocks.check_integrity()
        ranks = [rank(group) for group in self.running]
        assert ranks == sorted(set(ranks)), f"out of order: {ranks}"
        assert sum(group.num_seats for group in self.running) <= self.config.max_num_seqs
        assert 0 <= self.last_planned - self.last_read <= 2, (self.last_planned, self.last_read)
        assert len(list(self.waiting)) == len(self.waiting)
        for group in self.waiting:
            assert group.is_queued and not group.is_running and group.live, group
            for sequence in group.live:
                assert sequence.status is not Status.RUNNING, sequence
                assert sequence.status is not Status.WAITING or not sequence.num_computed
        for group in self.running:
            assert group.is_running and not group.is_queued and group.num_seats, group
            for sequence in group.live:
                self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        has_table = self.blocks.has_table(sequence.seq_id)
        assert has_table == (sequence.status is Status.RUNNING), sequence
        assert not self.blocks.is_swapped(sequence.seq_id), sequence
        if has_table:
            stored = self.blocks.num_stored(sequence.seq_id)
            assert stored == sequence.num_computed, (stored, sequence)
            assert sequence.num_computed <= sequence.num_tokens <= sequence.max_len, sequence
            most = max(sequence.num_computed + 1, sequence.prefill_len)
            blocks = len(self.blocks.table(sequence.seq_id))
            assert blocks <= self.cache.blocks_for(most), sequence

    def _stop_if_empty(self, group: SequenceGroup) -> None:
        if group.is_running and all(other.status is Status.LEAVING for other in group.live):
            self.stop(group)

    def _start_over(self, group: SequenceGroup) -> None:
        if group.is_running:
            self.stop(group)
            self.waiting.push(group)
        if group.prompt_logprobs is not None:  # what is in flight for it is lost
            group.num_targets = len(group.prompt_logprobs)
        self.forget_blocks(group)
