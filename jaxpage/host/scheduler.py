"""Requests in, plans out, results in, news out: the host as the engine sees it.

Knows no device. The engine may dispatch one plan before it has read the one before it; more than
that `schedule` refuses.

                    add            schedule               schedule             update
    Request ------> waiting -----> running --------------> leaving -----------> ended
                       ^              |   last step planned    result read
                       +--------------+
                         preempted: blocks freed, output kept, prefilled again;
                         or swapped: blocks on the host, back as they were
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import RequestError
from jaxpage.host.beam_tables import continue_beams
from jaxpage.host.ladder import Ladder
from jaxpage.host.limits import check_request, length_limit, outgrown
from jaxpage.host.plan import Request, Resumed, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.planner import Planner
from jaxpage.host.policy import PressureCosts
from jaxpage.host.sequence import Sequence, SequenceGroup, Status, new_group, resumed_group
from jaxpage.host.stop import End, find_end, is_complete
from jaxpage.host.updates import (
    Drawn,
    hypothesis_updates,
    new_update,
    take_scores,
)
from jaxpage.outputs import BlockMap, Counters, FinishReason


class Scheduler:
    """All requests that have not ended. Every sequence ends with exactly one reason or error."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        prefill_ladder: Ladder | None = None,
        costs: PressureCosts | None = None,
    ) -> None:
        """`prefill_ladder`: sizes that prefill steps are padded to, so that they fit well.

        `costs`: what `preemption="auto"` weighs, of this model on this machine.
        """
        self.counters = Counters()
        self.news: deque[SequenceUpdate] = deque()
        """What there is to tell, oldest first; taking one in is followed by removing it."""
        self._config = config
        self._cache = cache
        self._prefill_ladder = prefill_ladder
        self._costs = costs or PressureCosts()
        self._planner = self._new_planner()
        self._books = self._planner.books
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._num_created = 0
        self._peaks = (0, 0)
        """Blocks used and saved, of the books before these."""

    def check(self, request: Request) -> None:
        """Raises RequestError or PromptCapacityError for what `add` would refuse."""
        if request.request_id in self._groups:
            raise RequestError(
                f"got request id {request.request_id!r} again, wanted one that is not running; "
                "wait until it has finished, or give another id"
            )
        check_request(request, self._config, self._cache)

    def add(self, request: Request) -> None:
        """Lines a request up. Raises RequestError or PromptCapacityError."""
        self.check(request)
        max_len = length_limit(request, self._config)
        group = new_group(request, self._num_created + 1, max_len)
        self._num_created += len(group.sequences)
        self._groups[request.request_id] = group
        self._sequences.update((sequence.seq_id, sequence) for sequence in group.sequences)
        self._books.waiting.push(group)
        if is_complete(group.lead):
            self._end_all(group, End("length"))

    def schedule(self) -> StepPlan | None:
        """The next step to dispatch; None: read a result first, or there is nothing to do."""
        books = self._books
        assert books.last_planned - books.last_read <= 1, "two plans are unread: read one"
        plan = self._planner.plan()
        for group in self._planner.take_outgrown():
            self.news.append(new_update(group.lead, error=str(outgrown(group, self._cache))))
            self._forget(group)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in the result of the oldest unread plan. Tokens of ended sequences are dropped."""
        assert result.step_id == plan.step_id, (result.step_id, plan.step_id)
        self._planner.step_read(plan.step_id)
        sequences, draw_index = self._sequences, 0
        for row_index, row in enumerate(plan.rows):
            if row.prompt_targets and row.seq_id in sequences:
                group = sequences[row.seq_id].group
                take_scores(group, row, result.prompt_logprobs[row_index])
            for draw in row.draws:
                sequence = sequences.get(draw.seq_id)
                if sequence is not None:
                    if draw.num_candidates:
                        self._take_candidates(sequence, result, draw_index)
                    else:
                        self._take_token(sequence, result, draw_index)
                draw_index += 1
            if not row.draws and row.prompt_targets and row.seq_id in sequences:
                sequence = sequences[row.seq_id]
                if is_complete(sequence):
                    self._end_all(sequence.group, End("length"))

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """All news since the last call, oldest first."""
        updates = tuple(self.news)
        self.news.clear()
        return updates

    def finish(self, seq_id: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends one sequence for a cause the engine found. One that has ended stays as it is."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._end(sequence, End(reason, stop_reason))

    def abort(self, request_id: str) -> bool:
        """Ends a request, its tokens in flight dropped; False when there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._end_all(group, End("abort"))
        return True

    def drop(self, request_id: str) -> None:
        """Forgets a request without a word; an id that is not known is none."""
        group = self._groups.get(request_id)
        if group is not None:
            self._forget(group)

    def drop_unread(self) -> None:
        """Takes the plans that are not read for read: what they drew is wanted by no request.

        What they write is written: the device runs them before any plan that comes.
        """
        for step_id in range(self._books.last_read + 1, self._books.last_planned + 1):
            self._planner.step_read(step_id)

    def restart(self, going_on: Iterable[Resumed]) -> None:
        """Books as on the first day, and in line those that go on, with the tokens they have.

        For when the old books can't be trusted, or the pool is lost: nothing in them is looked at
        but the order in which requests came and what has been counted. It may be done again, also
        where it was broken off. News stay.
        """
        planner = self._new_planner()
        self._peaks = (self.peak_blocks_used, self.peak_blocks_saved)
        planner.books.last_planned = planner.books.last_read = self._books.last_planned
        groups: dict[str, SequenceGroup] = {}
        for told in going_on:
            known = self._groups[told.request.request_id]
            group = resumed_group(known, told)
            groups[told.request.request_id] = group
            planner.books.waiting.push(group)
        self._groups = groups
        self._sequences = {
            sequence.seq_id: sequence
            for group in groups.values()
            for sequence in group.sequences
            if sequence.status is not Status.ENDED
        }
        self._planner, self._books = planner, planner.books

    def request_ids(self, seq_ids: Iterable[int]) -> set[str]:
        """The requests of these sequences, as far as they have not ended."""
        sequences = filter(None, map(self._sequences.get, seq_ids))
        return {sequence.group.request.request_id for sequence in sequences}

    def reset_prefix_cache(self) -> None:
        """Nothing computed before now is found by a prompt that comes later."""
        self._books.blocks.reset_prefix_cache()

    def block_map(self) -> BlockMap:
        """Who owns which block now, by sequence ids, and whose request they are of."""
        request_of = {
            seq_id: sequence.group.request.request_id
            for seq_id, sequence in self._sequences.items()
        }
        return replace(self._books.blocks.block_map(), request_of=request_of)

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence has not ended, or a plan has not been read."""
        return bool(self._sequences) or self._books.last_planned > self._books.last_read

    @property
    def num_running(self) -> int:
        """Sequences that have a seat in the next step."""
        return sum(group.num_seats for group in self._books.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks of the pool: new, preempted or swapped."""
        return len(self._books.waiting)

    @property
    def blocks_total(self) -> int:
        return self._cache.num_blocks

    @property
    def blocks_free(self) -> int:
        """Blocks that can be taken; what only the prefix cache keeps is among them."""
        return self._books.blocks.num_free

    @property
    def peak_blocks_used(self) -> int:
        return max(self._peaks[0], self._books.blocks.pool.refs.peak_used)

    @property
    def peak_blocks_saved(self) -> int:
        """Most blocks that sharing saved at one time: entries of all tables less blocks."""
        return max(self._peaks[1], self._books.blocks.pool.peak_saved)

    def check_integrity(self) -> None:
        """Asserts that the books agree; for tests, after any operation."""
        books = self._books
        books.check_integrity()
        for seq_id, sequence in self._sequences.items():
            group = sequence.group
            assert sequence.seq_id == seq_id and sequence.status is not Status.ENDED, sequence
            is_leaving = sequence.status is Status.LEAVING
            is_read = sequence.candidates is not None  # a beam that waits for the others
            assert not is_leaving or is_read or books.is_in_flight(group), f"never ends: {sequence}"
            assert not sequence.num_in_flight or books.is_in_flight(group), sequence
            is_placed = group.is_queued or group.is_running
            assert is_placed or all(s.status is Status.LEAVING for s in group.live), sequence
        live = {sequence.group.request.request_id for sequence in self._sequences.values()}
        assert live == self._groups.keys(), (live, self._groups.keys())
        for group in (*books.waiting, *books.running):
            assert self._groups.get(group.request.request_id) is group, "ended, and in a queue"

    def _new_planner(self) -> Planner:
        return Planner(
            self._config,
            self._cache,
            prefill_ladder=self._prefill_ladder,
            costs=self._costs,
            counters=self.counters,
        )

    def _take_token(self, sequence: Sequence, result: StepResult, draw_index: int) -> None:
        """Appends what was drawn, also where the sequence has given way since."""
        drawn = Drawn.of(sequence, result, draw_index)
        sequence.token_ids.append(drawn.token_id)
        sequence.num_in_flight -= 1
        self.counters.generated_tokens += 1
        end = find_end(sequence)
        self.news.append(new_update(sequence, end=end, drawn=drawn))
        if end is not None:
            self._retire(sequence)

    def _take_candidates(self, sequence: Sequence, result: StepResult, draw_index: int) -> None:
        """Keeps what may follow a beam, and chooses once that is known of all beams."""
        sequence.candidates = tuple(result.top[draw_index])
        sequence.num_in_flight -= 1
        group = sequence.group
        if any(beam.candidates is None for beam in group.live):
            return
        continue_beams(self._books, group)
        assert group.beams is not None, group
        if group.beams.is_done:
            updates = hypothesis_updates(group)
            self.counters.generated_tokens += sum(len(news.new_token_ids) for news in updates)
            self.news += updates
            self._forget(group)

    def _end(self, sequence: Sequence, end: End) -> None:
        self.news.append(new_update(sequence, end=end))
        self._retire(sequence)

    def _end_all(self, group: SequenceGroup, end: End) -> None:
        live = [sequence for sequence in group.sequences if sequence.status is not Status.ENDED]
        self.news += [new_update(sequence, end=end) for sequence in live]  # all, or none is told
        self._forget(group)

    def _retire(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended, and its request with the last one."""
        self._books.remove(sequence)
        del self._sequences[sequence.seq_id]
        if not sequence.group.live:
            self._forget(sequence.group)

    def _forget(self, group: SequenceGroup) -> None:
        """Forgets a request and all of its sequences."""
        self._books.drop(group)
        for sequence in group.sequences:
            sequence.status = Status.ENDED
            self._sequences.pop(sequence.seq_id, None)
        group.live.clear()
        del self._groups[group.request.request_id]
