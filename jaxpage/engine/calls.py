"""What a caller of `LLM` may hand over, and its one form inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from jaxpage.engine.requests import check_prompts
from jaxpage.errors import ConfigError, RequestError
from jaxpage.numbers import plain
from jaxpage.outputs import RequestOutput, TokenLogprob
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

Prompt = str | Seq[int]
Params = SamplingParams | BeamSearchParams
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""


class Score(NamedTuple):
    """Log-probabilities of a completion: their sum, and one a token."""

    logprob: float
    tokens: tuple[TokenLogprob, ...]


def as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt | RequestError]:
    """One prompt is a text or a list of ids, or an array of one axis; many are a list of those, or
    an array of two. An error stands for an array among them that can't be read."""
    prompts = plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    check_prompts(prompts)
    items = [_plain_or_error(prompt) for prompt in prompts]
    if items and not any(isinstance(item, Iterable | RequestError) for item in items):
        return [items]  # type: ignore[list-item]  # ids of one prompt
    return items  # type: ignore[return-value]  # checked one by one at submission


def as_params(params: Params | Seq[Params] | None, count: int) -> list[Params]:
    """One setting for each of `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams | BeamSearchParams):
        return [params] * count
    if not isinstance(params, Iterable):
        raise ConfigError(
            f"got {type(params).__name__} as sampling params, wanted SamplingParams or a list of "
            "them; pass one"
        )
    items = list(params)
    if len(items) != count:
        raise ConfigError(
            f"got {len(items)} sampling params for {count} prompts, wanted one or one each; "
            "give as many as prompts"
        )
    return items


def in_order(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Outputs in the order of their prompts."""
    return sorted(outputs, key=lambda output: int(output.request_id))


def _plain_or_error(prompt: object) -> Any:
    try:
        return plain(prompt)
    except RequestError as error:
        return error
