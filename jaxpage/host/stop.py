"""When a sequence ends by its own tokens. Stop strings are found where text is made."""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.host.beam import Hypothesis
from jaxpage.host.plan import Request
from jaxpage.host.sequence import Sequence
from jaxpage.outputs import FinishReason


class End(NamedTuple):
    """Why a sequence ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or string; None for an end-of-text id or a limit."""


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


def beam_end(request: Request, found: Hypothesis) -> End:
    """Why a beam ended."""
    token_id = found.token_ids[-1]
    if found.is_at_limit:
        return End("length")
    is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
    return End("stop", None if is_eos else token_id)


def is_complete(sequence: Sequence) -> bool:
    """Whether the sequence only wanted its prompt scored, and has all that was asked for."""
    scores = sequence.group.prompt_logprobs
    return sequence.is_score_only and (scores is None or len(scores) == sequence.prompt_len)
