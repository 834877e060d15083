"""What the engine is told of a sequence: results put into words, nothing decided."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxpage.host.plan import PlannedRow, SequenceUpdate, StepResult
from jaxpage.host.sequence import Sequence, SequenceGroup
from jaxpage.host.stop import End, beam_end
from jaxpage.outputs import TokenLogprob


class Drawn(NamedTuple):
    """A token that was sampled, as the engine gets it."""

    token_id: int
    raw_logprob: float
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, sequence: Sequence, result: StepResult, draw_index: int) -> Drawn:
        token_id = int(result.token_ids[draw_index])
        raw_logprob = result.raw_logprobs[draw_index]
        if sequence.draw.params.logprobs is None:
            return cls(token_id, raw_logprob)
        logprob, top = result.logprobs[draw_index], result.top[draw_index]
        return cls(token_id, raw_logprob, (TokenLogprob(token_id, logprob, top),))


def new_update(
    sequence: Sequence,
    *,
    end: End | None = None,
    error: str | None = None,
    drawn: Drawn | None = None,
) -> SequenceUpdate:
    """News of a sequence; takes the prompt's scores along once they are complete."""
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
        None if group.prompt_logprobs is None else _hand_out_scores(group),
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
        end = beam_end(group.request, found)
        updates.append(
            SequenceUpdate(
                request_id=group.request.request_id,
                seq_id=sequence.seq_id,
                sample_index=place,
                new_token_ids=found.token_ids,
                raw_logprob_sum=found.logprob_sum,
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
                prompt_logprobs=_hand_out_scores(group),
                num_preemptions=group.num_preemptions,
                num_cached_tokens=group.num_cached_tokens or 0,
                score=found.score,
            )
        )
    return updates


def take_scores(group: SequenceGroup, row: PlannedRow, scores: Seq[TokenLogprob]) -> None:
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
