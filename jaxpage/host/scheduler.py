"""Requests in, plans out, results in, news out: the host as the engine sees it.

Knows no device. The engine may dispatch one plan before it has read the one before it; more than
that `schedule` refuses.

                    add            schedule               schedule             update
    Request ------> waiting -----> running --------------> leaving -----------> ended
                       ^              |   last step planned    result read
                       +--------------+
                         preempted: blocks freed, output kept, prefilled again
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import RequestError
from jaxpage.host.buckets import Ladder
from jaxpage.host.counters import Counters
from jaxpage.host.limits import check_request, length_limit, outgrown
from jaxpage.host.plan import PlannedRow, Request, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.planner import Planner
from jaxpage.host.sequence import Sequence, SequenceGroup, Status, new_sequence
from jaxpage.host.stop import End, find_end, is_complete
from jaxpage.outputs import FinishReason, TokenLogprob


class Scheduler:
    """All requests that have not ended. Every sequence ends with exactly one reason or error."""

    def __init__(
        self, config: EngineConfig, cache: CacheConfig, *, prefill_ladder: Ladder | None = None
    ) -> None:
        """`prefill_ladder`: sizes that prefill steps are padded to, so that they fit well."""
        self.counters = Counters()
        self._config = config
        self._cache = cache
        self._planner = Planner(
            config, cache, prefill_ladder=prefill_ladder, counters=self.counters
        )
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._num_created = 0
        self._updates: list[SequenceUpdate] = []

    def add(self, request: Request) -> None:
        """Lines a request up. Raises ConfigError, RequestError or PromptCapacityError."""
        if request.request_id in self._groups:
            raise RequestError(
                f"got request id {request.request_id!r} again, wanted one that is not running; "
                "wait until it has finished, or give another id"
            )
        check_request(request, self._config, self._cache)
        self._num_created += 1
        sequence = new_sequence(request, self._num_created, length_limit(request, self._config))
        self._groups[request.request_id] = sequence.group
        self._sequences[sequence.seq_id] = sequence
        self._planner.enqueue(sequence)
        if is_complete(sequence):
            self._report(sequence, end=End("length"))

    def schedule(self) -> StepPlan | None:
        """The next step to dispatch; None: read a result first, or there is nothing to do."""
        planner = self._planner
        assert planner.last_planned - planner.last_read <= 1, "two plans are unread: read one"
        plan = planner.plan()
        for sequence in planner.take_outgrown():
            self._report(sequence, error=str(outgrown(sequence, self._cache)))
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in the result of the oldest unread plan. Tokens of ended sequences are dropped."""
        assert result.step_id == plan.step_id, (result.step_id, plan.step_id)
        self._planner.step_read(plan.step_id)
        draw_index = 0
        for row_index, row in enumerate(plan.rows):
            sequence = self._sequences.get(row.seq_id)
            if sequence is not None:
                if row.prompt_targets:
                    _take_scores(sequence.group, row, result.prompt_logprobs[row_index])
                if row.draws:
                    self._take_token(sequence, result, draw_index)
                elif is_complete(sequence):
                    self._report(sequence, end=End("length"))
            draw_index += len(row.draws)

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """All news since the last call, oldest first."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def finish(self, seq_id: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends a sequence for a cause the engine found. One that has ended stays as it is."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._report(sequence, end=End(reason, stop_reason))

    def abort(self, request_id: str) -> bool:
        """Ends a request, its tokens in flight dropped; False when there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        for sequence in group.sequences:
            self.finish(sequence.seq_id, "abort", None)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence has not ended, or a plan has not been read."""
        return bool(self._sequences) or self._planner.last_planned > self._planner.last_read

    @property
    def num_running(self) -> int:
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        return len(self._planner.waiting)

    @property
    def blocks_total(self) -> int:
        return self._cache.num_blocks

    @property
    def blocks_free(self) -> int:
        return self._planner.blocks.num_free

    @property
    def peak_blocks_used(self) -> int:
        return self._planner.blocks.pool.peak_used

    def check_integrity(self) -> None:
        """Asserts that the books agree; for tests, after any operation."""
        planner = self._planner
        planner.check_integrity()
        queued = {sequence.seq_id for sequence in (*planner.waiting, *planner.running)}
        for seq_id, sequence in self._sequences.items():
            is_leaving = sequence.status is Status.LEAVING
            assert (seq_id in queued) != is_leaving, f"in no queue or in two: {sequence}"
            assert not is_leaving or planner.is_in_flight(sequence), f"never ends: {sequence}"
            assert not sequence.num_in_flight or planner.is_in_flight(sequence), sequence
        assert queued <= self._sequences.keys(), "an ended sequence in a queue"
        live = {sequence.group.request.request_id for sequence in self._sequences.values()}
        assert live == self._groups.keys(), (live, self._groups.keys())

    def _take_token(self, sequence: Sequence, result: StepResult, draw_index: int) -> None:
        """Appends what was drawn, also where the sequence has given way since."""
        token_id = int(result.token_ids[draw_index])
        sequence.token_ids.append(token_id)
        sequence.num_in_flight -= 1
        self.counters.generated_tokens += 1
        logprobs: tuple[TokenLogprob, ...] = ()
        if sequence.group.request.params.logprobs is not None:
            logprob, top = result.logprobs[draw_index], result.top[draw_index]
            logprobs = (TokenLogprob(token_id, logprob, top),)
        self._report(
            sequence,
            end=find_end(sequence),
            new_token_ids=(token_id,),
            logprobs=logprobs,
            raw_logprob_sum=result.raw_logprobs[draw_index],
        )

    def _report(
        self,
        sequence: Sequence,
        *,
        end: End | None = None,
        error: str | None = None,
        new_token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        raw_logprob_sum: float = 0.0,
    ) -> None:
        """Tells the engine, and forgets the sequence when this was the last of it."""
        request_id = sequence.group.request.request_id
        self._updates.append(
            SequenceUpdate(
                request_id=request_id,
                seq_id=sequence.seq_id,
                sample_index=sequence.sample_index,
                new_token_ids=new_token_ids,
                logprobs=logprobs,
                raw_logprob_sum=raw_logprob_sum,
                finish_reason=end.finish_reason if end else None,
                stop_reason=end.stop_reason if end else None,
                error=error,
                prompt_logprobs=_hand_out_scores(sequence.group),
                num_preemptions=sequence.num_preemptions,
            )
        )
        if end is not None or error is not None:
            self._planner.remove(sequence)
            del self._sequences[sequence.seq_id]
            if all(other.status is Status.ENDED for other in sequence.group.sequences):
                del self._groups[request_id]


def _take_scores(group: SequenceGroup, row: PlannedRow, scores: Seq[TokenLogprob]) -> None:
    """Rows come back in the order they were asked, so each one's scores follow the last one's."""
    assert group.prompt_logprobs is not None, f"row of {row.seq_id} was asked for no scores"
    assert len(scores) == len(row.prompt_targets), (len(scores), row.prompt_targets)
    assert len(group.prompt_logprobs) == row.start + row.target_offset + 1, row
    group.prompt_logprobs += scores


def _hand_out_scores(group: SequenceGroup) -> tuple[TokenLogprob | None, ...] | None:
    """The whole prompt's log-probabilities the first time they are complete, then None."""
    scores = group.prompt_logprobs
    if scores is None or len(scores) < len(group.request.prompt_token_ids):
        return None
    group.prompt_logprobs = None
    return tuple(scores)
