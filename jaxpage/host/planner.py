"""Which rows the next step runs: one token of each decoding sequence, then pieces of prompts.

Knows no result, only that a step was read. A long prompt delays no other sequence's next token:
prompts get the tokens of a step that the decoding rows leave.

    max_num_batched_tokens 8     A, B decode     C has 20 tokens to prefill
    step    A 1   B 1   C 0..5      one program: 2 decode rows, 6 prefill tokens
            A 1   B 1   C 6..11
            A 1   B 1   C 12..17
            A 1   B 1   C 18..19    draws C's first token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxpage.host.admission import admit_next, blocks_to_resume, can_resume, resume
from jaxpage.host.ladder import Ladder, cut_to_rung
from jaxpage.host.plan import Draw, PlannedRow, StepPlan
from jaxpage.host.preemption import Preemptor
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.host.state import State


class ScheduledRow(NamedTuple):
    """A sequence's share of the step being planned."""

    sequence: Sequence
    num_tokens: int


class Targets(NamedTuple):
    """Prompt tokens whose log-probability a row is asked for, as PlannedRow has them."""

    prompt_targets: tuple[int, ...] = ()
    target_offset: int = 0


NO_TARGETS = Targets()


def plan_step(state: State) -> StepPlan | None:
    """The next step, or None while nothing can run before a result is read."""
    while True:
        preemptor = Preemptor(state)
        prefilling: list[Sequence] = []
        decode = _decode_rows(state, preemptor, prefilling)
        num_waiting = len(state.queues.waiting)
        prefill = _prefill_rows(state, preemptor, prefilling, len(decode))
        # A sequence that resumed may have preempted groups whose rows are among these.
        decode = [row for row in decode if row.sequence.status is Status.RUNNING]
        if decode or prefill:
            return _dispatch(state, decode, prefill)
        if len(state.queues.waiting) >= num_waiting:
            return None
        # A group is back from the host with nothing to prefill: it decodes.


def find_too_large(state: State) -> SequenceGroup | None:
    """The group that not even the whole pool can hold, if that is why nothing could be planned.

    All results are read, no other group runs, and still it cannot go on.
    """
    if state.last_planned > state.last_read:
        return None  # an unread result may finish a sequence, and free its blocks
    running = state.queues.running
    assert len(running) <= 1, [group.request.request_id for group in running]
    return running[0] if running else state.queues.waiting.first()


def least_prefill_tokens(max_num_batched_tokens: int) -> int:
    """Tokens of a step that prompts always get, however many rows decode.

    Else, where max_num_seqs is close to max_num_batched_tokens, a prompt might wait until a
    sequence finishes.
    """
    return max(1, min(16, max_num_batched_tokens // 4))


def _decode_rows(
    state: State, preemptor: Preemptor, prefilling: list[Sequence]
) -> list[ScheduledRow]:
    """One token of each sequence that can decode and has a block for it, in order of rank.

    Those that have prompt tokens to feed are put into `prefilling`.
    """
    blocks, is_running = state.blocks, Status.RUNNING
    rows: list[ScheduledRow] = []
    for group in tuple(state.queues.running):
        if not group.is_running:
            continue  # preempted for one before it
        if group.beams is not None and group.is_ready:
            if all(_make_writable(state, preemptor, sequence) for sequence in group.live):
                rows += [ScheduledRow(sequence, 1) for sequence in group.live]
            continue
        for sequence in group.live:
            if sequence.status is not is_running:
                if sequence.status is Status.WAITING and not group.is_one_row:
                    prefilling.append(sequence)
            elif sequence.num_computed < sequence.prefill_len:
                prefilling.append(sequence)
            elif group.beams is None and (
                not blocks.num_blocks_to_write(sequence.seq_id, 1)
                or _make_writable(state, preemptor, sequence)
            ):
                rows.append(ScheduledRow(sequence, 1))
    return rows


def _make_writable(state: State, preemptor: Preemptor, sequence: Sequence) -> bool:
    """Whether the sequence's next position is in a block of its own now."""
    need = state.blocks.num_blocks_to_write(sequence.seq_id, 1)
    if need and not preemptor.make_room(sequence.group, need):
        return False
    state.blocks.prepare_write(sequence.seq_id, 1)
    return True


def _prefill_rows(
    state: State, preemptor: Preemptor, prefilling: list[Sequence], num_decode: int
) -> list[ScheduledRow]:
    """Pieces of prompts, as rows, tokens and blocks allow: those begun first, then waiting ones."""
    config, ladder = state.config, state.prefill_ladder
    budget = config.max_num_batched_tokens
    budget = max(budget - num_decode, least_prefill_tokens(budget))
    if ladder is not None:
        budget = min(budget, ladder.sizes[-1])
    rows: list[ScheduledRow] = []
    sequences = _next_prefill(state, preemptor, prefilling)
    while budget and len(rows) < config.max_prefill_rows:
        sequence = next(sequences, None)
        if sequence is None:
            break
        num_left = sequence.prefill_len - sequence.num_computed
        rows.append(ScheduledRow(sequence, min(num_left, budget)))
        budget -= rows[-1].num_tokens
    if ladder is not None and rows:
        _trim(rows, ladder)
    return rows


def _next_prefill(
    state: State, preemptor: Preemptor, prefilling: list[Sequence]
) -> Iterator[Sequence]:
    """Sequences with tokens to prefill and a table; a table is opened when its turn comes."""
    for sequence in prefilling:
        if sequence.group.is_running and (
            sequence.status is Status.RUNNING or _try_resume(state, preemptor, sequence)
        ):
            yield sequence
    while not preemptor.is_short:
        group = admit_next(state)
        if group is None:
            return
        yield from (
            sequence
            for sequence in group.live
            if sequence.status is Status.RUNNING and sequence.is_prefilling
        )


def _try_resume(state: State, preemptor: Preemptor, sequence: Sequence) -> bool:
    """Whether the sequence has a table now: its prefix parent is done, and there was room."""
    if not can_resume(state, sequence):
        return False
    need = blocks_to_resume(state, sequence)
    if need > state.blocks.num_free and not preemptor.make_room(sequence.group, need):
        return False
    resume(state, sequence)
    return True


def _dispatch(state: State, decode: list[ScheduledRow], prefill: list[ScheduledRow]) -> StepPlan:
    """The plan of these rows; from here on the state is as if the step had run."""
    blocks, step_id = state.blocks, state.last_planned + 1
    moves = blocks.take_moves()
    scheduled = [*decode, *sorted(prefill, key=_is_packed)]
    rows: list[PlannedRow] = []
    num_draws, is_running = 0, Status.RUNNING
    for sequence, num_tokens in scheduled:
        group = sequence.group
        assert sequence.status is is_running, f"planned, then preempted: {sequence}"
        assert not sequence.num_in_flight or sequence.last_step == step_id - 1, sequence
        row = _build_row(sequence, num_tokens, blocks.table(sequence.seq_id))
        rows.append(row)
        sequence.num_computed = end = row.start + num_tokens
        sequence.last_step = group.last_step = step_id
        if row.prompt_targets:
            group.num_targets += len(row.prompt_targets)
        if len(row.draws) == 1:
            sequence.num_in_flight += 1
            sequence.draw_id = num_draws
            num_draws += 1
        elif row.draws:
            for draw_id, sample in enumerate(group.live, num_draws):
                sample.num_in_flight += 1
                sample.draw_id = draw_id
            num_draws += len(row.draws)
        blocks.store(sequence.seq_id, end, sequence.token_ids, until_step=step_id)
    state.last_planned = step_id
    _count_step(state)
    for sequence, _ in scheduled:
        if sequence.group.is_one_row:
            _fork_samples(state, sequence)
        if sequence.is_last_step_planned:
            state.finish_planned(sequence)
    num_packed = sum(row.num_tokens > 1 or bool(row.prompt_targets) for row in rows[len(decode) :])
    return StepPlan(step_id, tuple(rows), len(rows) - num_packed, moves)


def _fork_samples(state: State, primary: Sequence) -> None:
    """Once the group's one row has drawn for all, or has nothing to draw, each goes on alone."""
    group = primary.group
    if not primary.num_in_flight and not primary.is_last_step_planned:
        return
    group.is_one_row = False
    for sample in group.live[1:]:
        sample.num_computed = sample.prefill_len = primary.num_computed
        sample.last_step = primary.last_step
        if not sample.is_last_step_planned:
            state.blocks.fork(primary.seq_id, sample.seq_id)
            sample.status = Status.RUNNING
        else:
            state.finish_planned(sample)


def _count_step(state: State) -> None:
    counters, pool = state.counters, state.blocks.pool
    counters.num_steps += 1
    counters.running_sum += sum(len(group.live) for group in state.queues.running)
    counters.utilisation_sum += pool.num_slots_in_use / pool.num_slots_allocated


def _is_packed(row: ScheduledRow) -> bool:
    """Whether it has several tokens or prompt targets, and so comes after those that have not."""
    sequence, num_tokens = row
    if num_tokens > 1:
        return True
    if sequence.group.prompt_logprobs is None:
        return False
    start = sequence.num_computed
    return bool(_targets(sequence, start, start + num_tokens).prompt_targets)


def _trim(rows: list[ScheduledRow], ladder: Ladder) -> None:
    """Leaves to the next step, from the end, what would mostly be padding in this one."""
    total = sum(row.num_tokens for row in rows)
    surplus = total - cut_to_rung(total, ladder)
    while surplus:
        sequence, num_tokens = rows.pop()
        kept = max(num_tokens - surplus, 0)
        if kept:
            rows.append(ScheduledRow(sequence, kept))
        surplus -= num_tokens - kept


def _build_row(sequence: Sequence, num_tokens: int, block_ids: tuple[int, ...]) -> PlannedRow:
    """The row that feeds the sequence's next `num_tokens` tokens; it draws if they are the last."""
    start, known = sequence.num_computed, sequence.token_ids
    end, num_known = start + num_tokens, len(known)
    is_in_flight = end > num_known
    num_existing = num_known + sequence.num_in_flight
    assert end <= num_existing, (start, num_tokens, num_existing)
    assert not is_in_flight or num_tokens == 1, "known tokens and one in flight in the same row"
    group = sequence.group
    targets = NO_TARGETS if group.prompt_logprobs is None else _targets(sequence, start, end)
    return PlannedRow(
        sequence.seq_id,
        () if is_in_flight else tuple(known[start:end]),
        sequence.draw_id if is_in_flight else None,
        start,
        num_tokens,
        block_ids,
        sequence.prompt_len,
        _draws(sequence, end - 1) if end == num_existing else (),
        targets.prompt_targets,
        targets.target_offset,
        sequence.draw.params.prompt_logprobs or 0,
        group.request.adapter,
    )


def _targets(sequence: Sequence, start: int, end: int) -> Targets:
    """What the row of the tokens from `start` to `end` (excluded) is asked for.

    tokens of the prompt     0   1   2   3   4   5        asked for before: tokens 1 and 2
    row, start 1, end 4          x   x   x
    its targets                          .   .            3 and 4; the first of them follows
                                                          the row's token 1: target_offset 1
    """
    first = max(start + 1, sequence.group.num_targets)
    targets = sequence.group.request.prompt_token_ids[first : end + 1]
    return Targets(targets, first - 1 - start) if targets else NO_TARGETS


def _draws(sequence: Sequence, last: int) -> tuple[Draw, ...]:
    """Its own draw; while one row stands for the whole group, those of all its sequences."""
    if not sequence.group.is_one_row or len(sequence.group.live) == 1:
        return sequence.own_draws or (_draw(sequence, last),)
    return tuple(_draw(sample, last) for sample in sequence.group.live)


def _draw(sequence: Sequence, last: int) -> Draw:
    """The sequence's draw, with the tokens before position `last` where the sampler needs them."""
    if sequence.own_draws is not None:
        return sequence.draw
    known = sequence.token_ids
    return replace(sequence.draw, history=tuple(known if last == len(known) else known[:last]))
