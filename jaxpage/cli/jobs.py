"""Prompts from the command line and from files, as jobs; a bad line is a job with an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from jaxpage.cli.prompt_lines import read_prompt_lines
from jaxpage.errors import RequestError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

_BEAM_FIELDS = frozenset(field.name for field in fields(BeamSearchParams))
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"logits_processors"}
_FIELDS = _BEAM_FIELDS | _SAMPLING_FIELDS
_TUPLES = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_token_ids"})


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete: text, token ids or messages; or the reason why it can't be."""

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    params: SamplingParams | BeamSearchParams | None = None
    error: str | None = None


def make_params(given: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
    """Beam search where a beam_width is among the fields, else sampling. Raises RequestError."""
    if given.get("beam_width") is None:
        alone = sorted(set(given) & (_BEAM_FIELDS - _SAMPLING_FIELDS))
        if [name for name in alone if given[name] is not None]:
            raise RequestError(
                f"got {alone[0]} without beam_width, wanted it for a beam search; leave it out"
            )
        return SamplingParams(**{name: given[name] for name in given if name not in alone})
    plain = SamplingParams(temperature=0.0)
    for name in sorted(set(given) - _BEAM_FIELDS - {"seed"}):
        if given[name] != getattr(plain, name):
            raise RequestError(
                f"got {name}={given[name]!r} beside beam_width, wanted a beam search alone; "
                "leave it out"
            )
    return BeamSearchParams(**{name: given[name] for name in given if name in _BEAM_FIELDS})


def jobs_from_prompts(
    prompts: Iterable[str], sampling: Mapping[str, Any], *, chat: bool, system: str | None
) -> list[Job]:
    """Jobs for prompts given as arguments. Raises RequestError for wrong settings."""
    params = make_params(sampling)
    if not chat:
        return [Job(prompt=prompt, params=params) for prompt in prompts]
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [
        Job(messages=(*opening, {"role": "user", "content": prompt}), params=params)
        for prompt in prompts
    ]


def jobs_from_file(
    name: str, sampling: Mapping[str, Any], *, chat: bool, system: str | None
) -> list[Job]:
    """Jobs of a prompt file, one a line that isn't blank; a bad line is a job with an error.

    `read_prompt_lines` says which files may be read and how they are told apart. Raises ConfigError
    when it can't be read.
    """
    is_jsonl, lines = read_prompt_lines(name)
    jobs = []
    for number, line in enumerate(lines, start=1):
        try:
            if isinstance(line, RequestError):
                raise line
            if is_jsonl:
                jobs.append(_job_from_json(line, sampling))
            else:
                jobs += jobs_from_prompts([line], sampling, chat=chat, system=system)
        except RequestError as error:
            where = "standard input" if name == "-" else name
            jobs.append(Job(error=f"prompt {number} of {where}: {error}"))
    return jobs


def _job_from_json(text: str, sampling: Mapping[str, Any]) -> Job:
    item = _parse_object(text)
    prompt, messages = item.pop("prompt", None), item.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise RequestError(
            "got an object with both or neither of prompt and messages, wanted one; give one"
        )
    unknown = sorted(set(item) - _FIELDS)
    if unknown:
        raise RequestError(
            f"got the field {unknown[0]!r}, wanted prompt, messages or a sampling field; "
            "check the spelling"
        )
    if "logit_bias" in item:
        item["logit_bias"] = _bias(item["logit_bias"])
    for name in _TUPLES & set(item):
        if item[name] is not None and not isinstance(item[name], str | list):
            raise RequestError(f"got {name}={item[name]!r}, wanted a list; put it in brackets")
    params = make_params({**sampling, **item})
    if messages is None:
        if not isinstance(prompt, str | list):
            raise RequestError(f"got prompt={prompt!r}, wanted text or token ids; give either")
        return Job(prompt=tuple(prompt) if isinstance(prompt, list) else prompt, params=params)
    if not isinstance(messages, list):
        raise RequestError(f"got messages={messages!r}, wanted a list; give role and content")
    return Job(messages=tuple(cast("list[Mapping[str, Any]]", messages)), params=params)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise RequestError(
            f"got a line that is not JSON ({error}), wanted an object; mend the line"
        ) from None
    if not isinstance(item, dict):
        raise RequestError(f"got JSON of type {type(item).__name__}, wanted an object; use braces")
    return item


def _bias(value: Any) -> Any:
    """JSON has no whole-number keys: "42" means 42."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise RequestError(f"got logit_bias={value!r}, wanted ids as keys; mend it") from None
