"""Requests in, plans out, results in, news out: the host as the engine sees it.

Knows no device. The engine may dispatch one plan before it has read the one before it; more than
that `schedule` refuses.

                    add            schedule               schedule               update
    Request ------> waiting -----> running --------------> finishing -----------> finished
                       ^              |   last step planned      result read
                       +--------------+
                         preempted: blocks freed, tokens kept, prefilled again;
                         or swapped: blocks on the host, back as they were
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import RequestError
from jaxpage.host.beam_tables import continue_beams
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.ladder import Ladder
from jaxpage.host.limits import check_request, length_limit, too_large
from jaxpage.host.plan import Request, Resumed, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.planner import find_too_large, plan_step
from jaxpage.host.policy import PreemptionCosts
from jaxpage.host.queues import Queues
from jaxpage.host.sequence import Sequence, SequenceGroup, Status, new_group, resumed_group
from jaxpage.host.state import State
from jaxpage.host.updates import (
    Drawn,
    End,
    find_end,
    hypothesis_updates,
    is_complete,
    new_update,
    take_prompt_logprobs,
)
from jaxpage.outputs import BlockMap, Counters, FinishReason


class Scheduler:
    """All requests that have not finished. Each sequence finishes once, by a reason or an error."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        prefill_ladder: Ladder | None = None,
        costs: PreemptionCosts | None = None,
    ) -> None:
        """`prefill_ladder`: sizes that prefill steps are padded to, so that they fit well.

        `costs`: what `preemption="auto"` weighs, of this model on this machine.
        """
        self.counters = Counters()
        self.news: deque[SequenceUpdate] = deque()
        """What there is to tell, oldest first; the engine removes each once it has taken it in."""
        self._config = config
        self._cache = cache
        self._prefill_ladder = prefill_ladder
        self._costs = costs or PreemptionCosts()
        self._state = self._new_state(last_step=0)
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._num_created = 0
        self._peaks_before = (0, 0)
        """Blocks used and saved, at most, before the last restart."""

    def check(self, request: Request) -> None:
        """Raises RequestError or PromptCapacityError for what can't be added."""
        if request.request_id in self._groups:
            raise RequestError(
                f"got request id {request.request_id!r} again, wanted one that is not running; "
                "wait until it has finished, or give another id"
            )
        check_request(request, self._config, self._cache)

    def add(self, request: Request) -> None:
        """Lets a request that `check` accepts wait for its turn."""
        assert request.request_id not in self._groups, f"twice: {request.request_id}"
        max_len = length_limit(request, self._config)
        group = new_group(request, self._num_created + 1, max_len)
        self._num_created += len(group.sequences)
        self._groups[request.request_id] = group
        self._sequences.update((sequence.seq_id, sequence) for sequence in group.sequences)
        self._state.queues.waiting.push(group)
        if is_complete(group.primary):
            self._finish_group(group, End("length"))

    def schedule(self) -> StepPlan | None:
        """The next step to dispatch; None: read a result first, or there is nothing to do."""
        state = self._state
        assert state.last_planned - state.last_read <= 1, "two plans are unread: read one"
        while True:
            plan = plan_step(state)
            group = find_too_large(state) if plan is None else None
            if group is None:
                return plan
            self.news.append(new_update(group.primary, error=str(too_large(group, self._cache))))
            self._remove_group(group)

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in the result of the oldest unread plan. Tokens after an end are dropped."""
        assert result.step_id == plan.step_id, (result.step_id, plan.step_id)
        self._state.step_read(plan.step_id)
        sequences, draw_id = self._sequences, 0
        for row_index, row in enumerate(plan.rows):
            if row.prompt_targets and row.seq_id in sequences:
                group = sequences[row.seq_id].group
                take_prompt_logprobs(group, row, result.prompt_logprobs[row_index])
            for draw in row.draws:
                sequence = sequences.get(draw.seq_id)
                if sequence is not None:
                    if draw.num_candidates:
                        self._take_candidates(sequence, result, draw_id)
                    else:
                        self._take_token(sequence, result, draw_id)
                draw_id += 1
            if not row.draws and row.prompt_targets and row.seq_id in sequences:
                sequence = sequences[row.seq_id]
                if is_complete(sequence):
                    self._finish_group(sequence.group, End("length"))

    def finish(self, seq_id: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Finishes one sequence for a cause the engine found; a finished one stays as it is."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self.news.append(new_update(sequence, end=End(reason, stop_reason)))
            self._remove(sequence)

    def abort(self, request_id: str) -> bool:
        """Finishes a request, its tokens in flight dropped; False when there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._finish_group(group, End("abort"))
        return True

    def drop(self, request_id: str) -> None:
        """Removes a request and tells nothing of it; does nothing where there is none."""
        group = self._groups.get(request_id)
        if group is not None:
            self._remove_group(group)

    def drop_unread(self) -> None:
        """Counts the unread plans as read; what they draw is wanted by no request.

        What they write is written: the device runs them before any plan made later.
        """
        for step_id in range(self._state.last_read + 1, self._state.last_planned + 1):
            self._state.step_read(step_id)

    def restart(self, going_on: Iterable[Resumed]) -> None:
        """Begins anew with empty queues and tables; these requests wait, with their tokens.

        For when the state can't be trusted, or the pool is lost: nothing of it is read but the
        order in which requests came and what has been counted. It may be called again, also where
        it was interrupted. News stay.
        """
        state = self._new_state(last_step=self._state.last_planned)
        self._peaks_before = (self.peak_blocks_used, self.peak_blocks_saved)
        groups: dict[str, SequenceGroup] = {}
        for told in going_on:
            known = self._groups[told.request.request_id]
            group = resumed_group(known, told)
            groups[told.request.request_id] = group
            state.queues.waiting.push(group)
        self._groups = groups
        self._sequences = {
            sequence.seq_id: sequence
            for group in groups.values()
            for sequence in group.sequences
            if sequence.status is not Status.FINISHED
        }
        self._state = state

    def request_ids(self, seq_ids: Iterable[int]) -> set[str]:
        """The requests of these sequences, as far as they have not finished."""
        sequences = filter(None, map(self._sequences.get, seq_ids))
        return {sequence.group.request.request_id for sequence in sequences}

    def reset_prefix_cache(self) -> None:
        """Nothing computed before now is found by a prompt that comes later."""
        self._state.blocks.reset_prefix_cache()

    def block_map(self) -> BlockMap:
        """Which block is in whose table now, with the request of each sequence."""
        request_of = {
            seq_id: sequence.group.request.request_id
            for seq_id, sequence in self._sequences.items()
        }
        return replace(self._state.blocks.block_map(), request_of=request_of)

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence has not finished, or a plan has not been read."""
        return bool(self._sequences) or self._state.last_planned > self._state.last_read

    @property
    def num_running(self) -> int:
        """Rows that the running groups may need in the next step."""
        return sum(group.num_rows_needed for group in self._state.queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks of the pool: new, preempted or swapped."""
        return len(self._state.queues.waiting)

    @property
    def blocks_total(self) -> int:
        return self._cache.num_blocks

    @property
    def blocks_free(self) -> int:
        """Blocks that can be taken; those that only the prefix cache keeps are among them."""
        return self._state.blocks.num_free

    @property
    def peak_blocks_used(self) -> int:
        return max(self._peaks_before[0], self._state.blocks.pool.refs.peak_used)

    @property
    def peak_blocks_saved(self) -> int:
        """Most blocks that sharing saved at one time: entries of all tables less blocks."""
        return max(self._peaks_before[1], self._state.blocks.pool.peak_saved)

    def check_integrity(self) -> None:
        """Asserts that sequences, queues and blocks agree; for tests, after any operation."""
        state = self._state
        state.check_integrity()
        for seq_id, sequence in self._sequences.items():
            group = sequence.group
            assert sequence.seq_id == seq_id and sequence.status is not Status.FINISHED, sequence
            is_finishing = sequence.status is Status.FINISHING
            is_read = sequence.candidates is not None  # a beam that waits for the others
            is_in_flight = state.is_in_flight(group)
            assert not is_finishing or is_read or is_in_flight, f"never finishes: {sequence}"
            assert not sequence.num_in_flight or is_in_flight, sequence
            is_queued = group.is_waiting or group.is_running
            assert is_queued or all(s.status is Status.FINISHING for s in group.live), sequence
        live = {sequence.group.request.request_id for sequence in self._sequences.values()}
        assert live == self._groups.keys(), (live, self._groups.keys())
        for group in (*state.queues.waiting, *state.queues.running):
            assert self._groups.get(group.request.request_id) is group, "finished, and in a queue"

    def _new_state(self, *, last_step: int) -> State:
        return State(
            config=self._config,
            cache=self._cache,
            prefill_ladder=self._prefill_ladder,
            costs=self._costs,
            counters=self.counters,
            queues=Queues(),
            blocks=BlockManager(
                self._cache, enable_prefix_caching=self._config.enable_prefix_caching
            ),
            last_planned=last_step,
            last_read=last_step,
        )

    def _take_token(self, sequence: Sequence, result: StepResult, draw_id: int) -> None:
        """Appends what was drawn, also where the sequence was preempted since."""
        drawn = Drawn.of(sequence, result, draw_id)
        sequence.token_ids.append(drawn.token_id)
        sequence.num_in_flight -= 1
        self.counters.generated_tokens += 1
        end = find_end(sequence)
        self.news.append(new_update(sequence, end=end, drawn=drawn))
        if end is not None:
            self._remove(sequence)

    def _take_candidates(self, sequence: Sequence, result: StepResult, draw_id: int) -> None:
        """Keeps what may follow a beam, and chooses once that is known of all beams."""
        sequence.candidates = tuple(result.top[draw_id])
        sequence.num_in_flight -= 1
        group = sequence.group
        if any(beam.candidates is None for beam in group.live):
            return
        continue_beams(self._state, group)
        assert group.beams is not None, group
        if group.beams.is_done:
            updates = hypothesis_updates(group)
            self.counters.generated_tokens += sum(len(news.new_token_ids) for news in updates)
            self.news += updates
            self._remove_group(group)

    def _finish_group(self, group: SequenceGroup, end: End) -> None:
        unfinished = [s for s in group.sequences if s.status is not Status.FINISHED]
        self.news += [new_update(sequence, end=end) for sequence in unfinished]  # all, or none
        self._remove_group(group)

    def _remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has finished, and its request with the last one."""
        self._state.finish(sequence)
        del self._sequences[sequence.seq_id]
        if not sequence.group.live:
            self._remove_group(sequence.group)

    def _remove_group(self, group: SequenceGroup) -> None:
        """Removes a request and all its sequences, wherever they are."""
        self._state.finish_group(group)
        for sequence in group.sequences:
            sequence.status = Status.FINISHED
            self._sequences.pop(sequence.seq_id, None)
        group.live.clear()
        del self._groups[group.request.request_id]
