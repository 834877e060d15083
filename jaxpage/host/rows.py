"""One sequence's part of a step, as a message. Builds rows, decides nothing, changes nothing.

tokens of the prompt     0   1   2   3   4   5        targets asked before: tokens 1 and 2
row, start 1, 3 tokens       x   x   x
targets of the row                   .   .            3 and 4: prompt_targets; the first
                                                      follows the row's token 1: target_offset
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxpage.host.plan import Draw, PlannedRow
from jaxpage.host.sequence import Sequence


class Targets(NamedTuple):
    """Prompt tokens whose log-probability a row is asked for, as PlannedRow has them."""

    prompt_targets: tuple[int, ...] = ()
    target_offset: int = 0


NO_TARGETS = Targets()


def build_row(sequence: Sequence, num_tokens: int, block_ids: tuple[int, ...]) -> PlannedRow:
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
        sequence.draw_index if is_in_flight else None,
        start,
        num_tokens,
        block_ids,
        sequence.prompt_len,
        _draws(sequence, end - 1) if end == num_existing else (),
        targets.prompt_targets,
        targets.target_offset,
        sequence.draw.params.prompt_logprobs or 0,
    )


def wants_scores(sequence: Sequence, num_tokens: int) -> bool:
    """Whether the row of the sequence's next `num_tokens` tokens would have prompt targets."""
    if sequence.group.prompt_logprobs is None:
        return False
    start = sequence.num_computed
    return bool(_targets(sequence, start, start + num_tokens).prompt_targets)


def _targets(sequence: Sequence, start: int, end: int) -> Targets:
    first = max(start + 1, sequence.group.num_targets)
    targets = sequence.group.request.prompt_token_ids[first : end + 1]
    return Targets(targets, first - 1 - start) if targets else NO_TARGETS


def _draws(sequence: Sequence, last: int) -> tuple[Draw, ...]:
    """Its own draw; while one row stands for the whole group, everybody's."""
    if not sequence.group.is_one_row or len(sequence.group.live) == 1:
        return sequence.own_draws or (_draw(sequence, last),)
    return tuple(_draw(sample, last) for sample in sequence.group.live)


def _draw(sequence: Sequence, last: int) -> Draw:
    """The sequence's draw, with the tokens before position `last` where the sampler needs them."""
    if sequence.own_draws is not None:
        return sequence.draw
    known = sequence.token_ids
    return replace(sequence.draw, history=tuple(known if last == len(known) else known[:last]))
