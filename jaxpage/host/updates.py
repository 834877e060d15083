"""What a result means for a sequence, and what the engine is told of it.

Finds ends by tokens only: stop strings are found where text is made.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxpage.host.beam import Hypothesis
from jaxpage.host.plan import PlannedRow, Request, SequenceUpdate, StepResult
from jaxpage.host.sequence import Sequence, SequenceGroup
from jaxpage.outputs import FinishReason, TokenLogprob


class End(NamedTuple):
    """Why a sequence finished."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or string; None for an end-of-text id or a limit."""


class Drawn(NamedTuple):
    """A token that was drawn, as the engine gets it."""

    token_id: int
    raw_logprob: float
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, sequence: Sequence, result: StepResult, draw_id: int) -> Drawn:
        token_id = int(result.token_ids[draw_id])
        raw_logprob = result.raw_logprobs[draw_id]
        if sequence.draw.params.logprobs is None:
            return cls(token_id, raw_logprob)
        logprob, top = result.logprobs[draw_id], result.top[draw_id]
        return cls(token_id, raw_logprob, (TokenLogprob(token_id, logprob, top),))


def find_end(sequence: Sequence) -> End | None:
    """Whether the sequence ends with its newest token, and why.

    A token among the first min_tokens never ends it. An end token at the length limit is a stop.
    """
    request, token_id = sequence.group.request, sequence.token_ids[-1]
    params = request.params
    if len(sequence.token_ids) - sequence.prompt_len > params.min_tokens:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return End("stop")
        if token_id in params.stop_token_ids:
            return End("stop", token_id)
    return End("length") if len(sequence.token_ids) >= sequence.max_len else None


def is_complete(sequence: Sequence) -> bool:
    """Whether only log-probabilities of the prompt were asked for, and all of them are read."""
    logprobs = sequence.group.prompt_logprobs
    return sequence.is_prompt_only and (logprobs is None or len(logprobs) == sequence.prompt_len)


def take_prompt_logprobs(
    group: SequenceGroup, row: PlannedRow, logprobs: Seq[TokenLogprob]
) -> None:
    """Adds those of a row to the group's; rows are read in the order they were asked for."""
    assert group.prompt_logprobs is not None, f"row of {row.seq_id} was asked for none"
    assert len(logprobs) == len(row.prompt_targets), (len(logprobs), row.prompt_targets)
    assert len(group.prompt_logprobs) == row.start + row.target_offset + 1, row
    group.prompt_logprobs += logprobs


def new_update(
    sequence: Sequence,
    *,
    end: End | None = None,
    error: str | None = None,
    drawn: Drawn | None = None,
) -> SequenceUpdate:
    """News of a sequence; tells the prompt's log-probabilities too, once they are complete."""
    group = sequence.group
    return SequenceUpdate(
        group.request.request_id,
        sequence.seq_id,
        sequence.sample_index,
        (drawn.token_id,) if drawn else (),
        drawn.logprobs if drawn else (),
        drawn.raw_logprob if drawn else 0.0,
        end.finish_reason if end else None,
        end.stop_reason if end else None,
        error,
        None if group.prompt_logprobs is None else _complete_prompt_logprobs(group),
        group.num_preemptions,
        group.num_cached_tokens or 0,
    )


def hypothesis_updates(group: SequenceGroup) -> list[SequenceUpdate]:
    """A finished beam search, best first, one update a hypothesis."""
    assert group.beams is not None and group.beams.is_done, group
    updates: list[SequenceUpdate] = []
    for place, (sequence, found) in enumerate(
        zip(group.sequences, group.beams.finished, strict=False)
    ):
        end = _beam_end(group.request, found)
        updates.append(
            SequenceUpdate(
                request_id=group.request.request_id,
                seq_id=sequence.seq_id,
                sample_index=place,
                new_token_ids=found.token_ids,
                raw_logprob_sum=found.logprob_sum,
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
                prompt_logprobs=_complete_prompt_logprobs(group),
                num_preemptions=group.num_preemptions,
                num_cached_tokens=group.num_cached_tokens or 0,
                score=found.score,
            )
        )
    return updates


def _beam_end(request: Request, found: Hypothesis) -> End:
    token_id = found.token_ids[-1]
    if found.is_at_limit:
        return End("length")
    is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
    return End("stop", None if is_eos else token_id)


def _complete_prompt_logprobs(group: SequenceGroup) -> tuple[TokenLogprob | None, ...] | None:
    """The whole prompt's log-probabilities the first time they are complete, then None."""
    logprobs = group.prompt_logprobs
    if logprobs is None or len(logprobs) < len(group.request.prompt_token_ids):
        return None
    group.prompt_logprobs = None
    return tuple(logprobs)
