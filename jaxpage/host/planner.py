"""Which rows the next step runs: a token of everybody who decodes, then pieces of prompts.

Knows no result and no reason for an end, only that a step was read. No long prompt holds up
anybody's next token: what the decoding rows leave of the step's tokens is what prompts get.

    max_num_batched_tokens 8     A, B decode     C has 20 tokens to prefill
    step    A 1   B 1   C 0..5      one program: 2 decode rows, 6 prefill tokens
            A 1   B 1   C 6..11
            A 1   B 1   C 12..17
            A 1   B 1   C 18..19    draws C's first token
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host.admission import Admission
from jaxpage.host.ladder import Ladder, cut_to_rung
from jaxpage.host.plan import PlannedRow, StepPlan
from jaxpage.host.policy import PressureCosts
from jaxpage.host.preemption import Pressure
from jaxpage.host.prefix_groups import find_prefix_groups
from jaxpage.host.rows import build_row, wants_scores
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.host.state import Books
from jaxpage.outputs import Counters


class Part(NamedTuple):
    """A sequence's share of the step being planned."""

    sequence: Sequence
    num_tokens: int


class Planner:
    """Makes plans of what waits and runs."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        prefill_ladder: Ladder | None,
        costs: PressureCosts,
        counters: Counters,
    ) -> None:
        self.books = Books(config, cache, counters)
        self._ladder = prefill_ladder
        self._admission = Admission(self.books)
        self._pressure = Pressure(self.books, costs)
        self._outgrown: list[SequenceGroup] = []

    def plan(self) -> StepPlan | None:
        """The next step, or None while nothing can run before a result is read."""
        while True:
            self._pressure.is_short = False
            under_way: list[Sequence] = []
            decode = self._decode_parts(under_way)
            num_waiting = len(self.books.waiting)
            prefill = self._prefill_parts(under_way, len(decode))
            # Who followed his leader may have made others give way that were to run.
            decode = [part for part in decode if part.sequence.status is Status.RUNNING]
            if decode or prefill:
                return self._dispatch(decode, prefill)
            has_returned = len(self.books.waiting) < num_waiting  # from the host, to decode
            if not has_returned and not self._drop_outgrown():
                return None

    def take_outgrown(self) -> list[SequenceGroup]:
        """Groups that `plan` found to need more than the whole pool; they hold nothing now."""
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def step_read(self, step_id: int) -> None:
        """Makes what this step was the last to touch available again. Steps come in order."""
        books = self.books
        assert step_id == books.last_read + 1 <= books.last_planned, (step_id, books.last_read)
        books.last_read = step_id
        books.blocks.step_read(step_id)

    def _decode_parts(self, under_way: list[Sequence]) -> list[Part]:
        """One token of everybody who has room for it, or gets it, in order of rank.

        Those who have prompt tokens to feed are put aside in `under_way`.
        """
        blocks, is_running = self.books.blocks, Status.RUNNING
        parts: list[Part] = []
        for group in tuple(self.books.running):
            if not group.is_running:
                continue  # it gave way to one before it
            if group.beams is not None and group.is_ready:
                if all(self._make_writable(sequence) for sequence in group.live):
                    parts += [Part(sequence, 1) for sequence in group.live]
                continue
            for sequence in group.live:
                if sequence.status is not is_running:
                    if sequence.status is Status.WAITING and not group.is_one_row:
                        under_way.append(sequence)
                elif sequence.num_computed < sequence.prefill_len:
                    under_way.append(sequence)
                elif group.beams is None and (
                    not blocks.num_blocks_to_write(sequence.seq_id, 1)
                    or self._make_writable(sequence)
                ):
                    parts.append(Part(sequence, 1))
        return parts

    def _make_writable(self, sequence: Sequence) -> bool:
        """Whether the sequence's next position is in a block of its own now."""
        blocks = self.books.blocks
        need = blocks.num_blocks_to_write(sequence.seq_id, 1)
        if need and not self._pressure.make_room(sequence.group, need):
            return False
        blocks.prepare_write(sequence.seq_id, 1)
        return True

    def _prefill_parts(self, under_way: list[Sequence], num_decode: int) -> list[Part]:
        """Prompts under way, then of the waiting what rows, tokens and blocks allow, in order."""
        config, ladder = self.books.config, self._ladder
        budget = config.max_num_batched_tokens
        budget = max(budget - num_decode, least_prefill_tokens(budget))
        if ladder is not None:
            budget = min(budget, ladder.sizes[-1])
        parts: list[Part] = []
        queue = self._begun(under_way)
        while budget and len(parts) < config.max_prefill_rows:
            sequence = next(queue, None)
            if sequence is None:
                break
            num_left = sequence.prefill_len - sequence.num_computed
            parts.append(Part(sequence, min(num_left, budget)))
            budget -= parts[-1].num_tokens
        if ladder is not None and parts:
            _trim(parts, ladder)
        return parts

    def _begun(self, under_way: list[Sequence]) -> Iterator[Sequence]:
        """Who has tokens to prefill and a table for them; tables are opened as one asks."""
        for sequence in under_way:
            if sequence.group.is_running and (
                sequence.status is Status.RUNNING or self._follow(sequence)
            ):
                yield sequence
        while not self._pressure.is_short:
            group = self._admission.admit_next()
            if group is None:
                return
            yield from (
                sequence
                for sequence in group.live
                if sequence.status is Status.RUNNING and sequence.is_prefilling
            )

    def _follow(self, sequence: Sequence) -> bool:
        """Opens the table of one whose leader has come far enough, others giving way for it."""
        admission = self._admission
        if not admission.is_led(sequence):
            return False
        need = admission.follow(sequence)
        if need > self.books.blocks.num_free and not self._pressure.make_room(sequence.group, need):
            return False
        admission.open_led(sequence)
        return True

    def _drop_outgrown(self) -> bool:
        """Whether a group has just been dropped that not even the whole pool can hold.

        With all results read and everybody else out of the way, it still cannot go on.
        """
        books = self.books
        if books.last_planned > books.last_read:
            return False  # a result unread might be the end, and brings blocks back
        group = books.running[0] if books.running else books.waiting.first()
        if group is None:
            return False
        assert len(books.running) <= 1, [other.request.request_id for other in books.running]
        self._outgrown.append(group)
        books.drop(group)
        return True

    def _dispatch(self, decode: list[Part], prefill: list[Part]) -> StepPlan:
        """The plan of these parts; the books are from here on as if the step had run."""
        books = self.books
        step_id = books.last_planned + 1
        preempted = self._pressure.take_preempted()
        moves, blocks = books.blocks.take_moves(), books.blocks
        parts = [*decode, *_short_first(prefill)]
        rows: list[PlannedRow] = []
        num_draws, is_running = 0, Status.RUNNING
        for sequence, num_tokens in parts:
            group = sequence.group
            assert sequence.status is is_running, f"planned, then taken back: {sequence}"
            assert not sequence.num_in_flight or sequence.last_step == step_id - 1, sequence
            row = build_row(sequence, num_tokens, blocks.table(sequence.seq_id))
            rows.append(row)
            sequence.num_computed = end = row.start + num_tokens
            sequence.last_step = group.last_step = step_id
            if row.prompt_targets:
                group.num_targets += len(row.prompt_targets)
            if len(row.draws) == 1:
                sequence.num_in_flight += 1
                sequence.draw_index = num_draws
                num_draws += 1
            elif row.draws:
                _note_draws(group, num_draws)
                num_draws += len(row.draws)
            blocks.store(sequence.seq_id, end, sequence.token_ids, until_step=step_id)
        books.last_planned = step_id
        self._count_step()
        for sequence, _ in parts:
            if sequence.group.is_one_row:
                self._fork_samples(sequence)
            if sequence.is_last_step_planned:
                books.leave(sequence)
        groups = ()
        if books.config.shared_prefix_decode:
            groups = find_prefix_groups(rows, parts, books.cache.block_size)
        return StepPlan(step_id, tuple(rows), moves, preempted, groups)

    def _fork_samples(self, lead: Sequence) -> None:
        """Parts what was one row until it drew, or had nothing to draw."""
        books, group = self.books, lead.group
        if not lead.num_in_flight and not lead.is_last_step_planned:
            return
        group.is_one_row = False
        for sample in group.live[1:]:
            sample.num_computed = sample.prefill_len = lead.num_computed
            sample.last_step = lead.last_step
            if not sample.is_last_step_planned:
                books.blocks.fork(lead.seq_id, sample.seq_id)
                sample.status = Status.RUNNING
            else:
                books.leave(sample)

    def _count_step(self) -> None:
        books, counters = self.books, self.books.counters
        counters.num_steps += 1
        counters.running_sum += sum(len(group.live) for group in books.running)
        counters.utilisation_sum += (
            books.blocks.pool.num_slots_in_use / books.blocks.pool.num_slots_allocated
        )


def least_prefill_tokens(max_num_batched_tokens: int) -> int:
    """A step's room for prompts, however many decode.

    Where max_num_seqs comes near max_num_batched_tokens, a prompt would else wait for an end.
    """
    return max(1, min(16, max_num_batched_tokens // 4))


def _note_draws(group: SequenceGroup, first: int) -> None:
    for index, sample in enumerate(group.live, first):
        sample.num_in_flight += 1
        sample.draw_index = index


def _short_first(parts: list[Part]) -> list[Part]:
    """A plan's rows of one token, that score no prompt, come before the longer ones."""
    if len(parts) == 1:
        return parts
    return sorted(parts, key=lambda part: part.num_tokens > 1 or wants_scores(*part))


def _trim(parts: list[Part], ladder: Ladder) -> None:
    """Leaves to the next step, from the end, what would mostly be padding in this one."""
    total = sum(part.num_tokens for part in parts)
    surplus = total - cut_to_rung(total, ladder)
    while surplus:
        sequence, num_tokens = parts.pop()
        kept = max(num_tokens - surplus, 0)
        if kept:
            parts.append(Part(sequence, kept))
        surplus -= num_tokens - kept
