"""What planning reads and writes: the queues, the blocks, and how far plans have been read.

Decides nothing. The scheduler makes a state and hands it to the functions that plan. A sequence
gives up its blocks only here, together with its place in the queues, so that the two always agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.ladder import Ladder
from jaxpage.host.policy import PreemptionCosts, rank
from jaxpage.host.queues import Queues
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.outputs import Counters


@dataclass(slots=True, eq=False)
class State:
    """The state of one scheduler; after a restart it is another one."""

    config: EngineConfig
    cache: CacheConfig
    prefill_ladder: Ladder | None
    costs: PreemptionCosts
    counters: Counters
    queues: Queues
    blocks: BlockManager
    last_planned: int
    """Step id of the last plan; 0 before the first."""
    last_read: int
    """Step id of the last plan whose result has been read."""

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Whether a step that has a row of the group has not been read."""
        return group.last_step > self.last_read

    def step_read(self, step_id: int) -> None:
        """Frees what only this step still used. Steps come in order."""
        assert step_id == self.last_read + 1 <= self.last_planned, (step_id, self.last_read)
        self.last_read = step_id
        self.blocks.step_read(step_id)

    def free(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks, once no step in flight uses them."""
        until_step = sequence.last_step if sequence.last_step > self.last_read else None
        self.blocks.free(sequence.seq_id, until_step=until_step)

    def free_group(self, group: SequenceGroup) -> None:
        """Frees the blocks of all its sequences: each is to be computed anew, tokens kept."""
        for sequence in group.live:
            if sequence.status is Status.FINISHING:
                continue  # it computes nothing more
            if sequence.status is Status.RUNNING:
                self.free(sequence)
            elif sequence.status is Status.SWAPPED:
                self.blocks.free_swapped(sequence.seq_id)
            sequence.status = Status.WAITING
            sequence.num_computed = 0
            sequence.prefix_parent = sequence.candidates = None

    def finish_planned(self, sequence: Sequence) -> None:
        """A sequence's last step is planned: its blocks and its row are free for others."""
        if sequence.status is Status.RUNNING:
            self.free(sequence)
        sequence.status = Status.FINISHING
        self._stop_if_done(sequence.group)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has finished: frees what it has and takes it out of its group."""
        group, status = sequence.group, sequence.status
        if status is Status.RUNNING:
            self.free(sequence)
        elif status is Status.SWAPPED:
            self.blocks.free_swapped(sequence.seq_id)
        sequence.status = Status.FINISHED
        if sequence not in group.live:
            return  # a beam that is not in use
        was_primary = sequence is group.primary
        group.live.remove(sequence)
        if group.is_waiting and not group.live:
            self.queues.waiting.remove(group)
        self._stop_if_done(group)
        if any(other.prefix_parent is sequence for other in group.live) or (
            was_primary and group.is_one_row and group.live
        ):
            self._begin_anew(group)  # what the others wait for will never be computed

    def finish_group(self, group: SequenceGroup) -> None:
        """Takes a group out of the queues and frees all its blocks."""
        self.queues.remove(group)
        self.free_group(group)

    def check_integrity(self) -> None:
        """Queues are in order and disjoint, tables exist for what runs, none is too long."""
        self.blocks.check_integrity()
        waiting, running = self.queues.waiting, self.queues.running
        ranks = [rank(group) for group in running]
        assert ranks == sorted(set(ranks)), f"out of order: {ranks}"
        assert sum(group.num_rows_needed for group in running) <= self.config.max_num_seqs
        assert 0 <= self.last_planned - self.last_read <= 2, (self.last_planned, self.last_read)
        assert len(list(waiting)) == len(waiting)
        for group in waiting:
            assert group.is_waiting and not group.is_running and group.live, group
            for sequence in group.live:
                assert sequence.status is not Status.RUNNING, sequence
                assert sequence.status is not Status.WAITING or not sequence.num_computed
        for group in running:
            assert group.is_running and not group.is_waiting and group.num_rows_needed, group
            for sequence in group.live:
                self._check_sequence(sequence)

    def _stop_if_done(self, group: SequenceGroup) -> None:
        if group.is_running and all(other.status is Status.FINISHING for other in group.live):
            self.queues.stop(group)

    def _begin_anew(self, group: SequenceGroup) -> None:
        if group.is_running:
            self.queues.stop(group)
            self.queues.waiting.push(group)
        if group.prompt_logprobs is not None:  # those in flight are lost
            group.num_targets = len(group.prompt_logprobs)
        self.free_group(group)

    def _check_sequence(self, sequence: Sequence) -> None:
        has_table = self.blocks.has_table(sequence.seq_id)
        assert has_table == (sequence.status is Status.RUNNING), sequence
        assert not self.blocks.is_swapped(sequence.seq_id), sequence
        if has_table:
            stored = self.blocks.num_stored(sequence.seq_id)
            assert stored == sequence.num_computed, (stored, sequence)
            assert sequence.num_computed <= sequence.num_tokens <= sequence.max_len, sequence
            most = max(sequence.num_computed + 1, sequence.prefill_len)
            num_blocks = len(self.blocks.table(sequence.seq_id))
            assert num_blocks <= self.cache.blocks_for(most), sequence
