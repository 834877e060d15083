"""From what a caller hands over to checked Requests: token ids, a seed, the ids that end each."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import index
from typing import Any, NamedTuple

from jaxpage.config import ModelConfig
from jaxpage.engine.detokenize import Detokenizer
from jaxpage.engine.sampling_inputs import check_fits
from jaxpage.errors import ConfigError, RequestError
from jaxpage.host.plan import Namespace, Request
from jaxpage.numbers import plain
from jaxpage.outputs import RequestOutput, TokenLogprob
from jaxpage.reading import answering
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.tokenizer import ChatPrompt, Tokenizer
from jaxpage.unsupported import check_available

Prompt = str | Seq[int]
Params = SamplingParams | BeamSearchParams
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""


class Score(NamedTuple):
    """Log-probabilities of a completion: their sum, and one a token."""

    logprob: float
    tokens: tuple[TokenLogprob, ...]


class RequestFactory:
    """Builds the requests of one engine; `seed` starts the stream that unseeded requests use."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        *,
        num_token_ids: int,
        seed: int,
        num_adapters: int = 0,
    ) -> None:
        """`num_adapters`: requests may name one of 1 .. num_adapters."""
        self.tokenizer = tokenizer
        self._num_adapters = num_adapters
        self._eos_token_ids = _ends(tokenizer, config, num_token_ids)
        self._num_token_ids = num_token_ids
        self._seeds = random.Random(seed)

    def build(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: int = 0,
    ) -> Request:
        """The checked request. Raises RequestError, or ConfigError for a later feature."""
        params = check_available(params)
        priority, adapter = plain(priority), plain(adapter)
        _check_labels(request_id, priority, cache_salt)
        self._check_adapter(adapter)
        beam = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=params.max_tokens,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            )
        drawn = self._seeds.getrandbits(
            64
        )  # always: a request's own seed must not shift the others'
        if params.stop:  # without a tokenizer there is no text to find them in
            self._need_tokenizer("stop")
        request = Request(
            request_id=request_id,
            prompt_token_ids=self.encode(prompt),
            params=params,
            seed=drawn if params.seed is None else params.seed,
            arrival_s=time.monotonic(),
            eos_token_ids=self._eos_token_ids,
            bad_word_ids=self._bad_word_ids(params.bad_words),
            priority=priority,
            namespace=_namespace(cache_salt, adapter),
            adapter=adapter,
            beam=beam,
        )
        check_fits(request, self._num_token_ids)
        return request

    def detokenizer(self, request: Request) -> Detokenizer | None:
        """A fresh detokeniser for one completion; None when no text is wanted or possible."""
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def encode_completion(self, completion: str | Seq[int]) -> tuple[int, ...]:
        """The ids of what follows a prompt: for text, without special tokens at its start."""
        completion = plain(completion)
        if not isinstance(completion, str):
            return self.encode(completion)
        _check_text("a completion", completion)
        ids = self._ids("a completion of text", completion, add_special_tokens=False)
        if not ids:
            raise RequestError("got an empty completion, wanted at least one token; write some")
        return ids

    def encode(self, prompt: str | Seq[int]) -> tuple[int, ...]:
        """The ids of a prompt. Raises RequestError."""
        prompt = plain(prompt)
        if isinstance(prompt, str):
            _check_text("a prompt", prompt)
            # a caller's own tokenizer knows nothing of ChatPrompt
            how = {"add_special_tokens": False} if isinstance(prompt, ChatPrompt) else {}
            ids = self._ids("a prompt of text", prompt, **how)
            if not ids:
                raise RequestError(
                    "got an empty prompt and a model without a begin-of-text token, wanted at "
                    "least one token; write some text"
                )
            return ids
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(f"got prompt={prompt!r}, wanted text or token ids; pass either")
        ids = tuple(plain(token_id) for token_id in prompt)
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(
                    f"got {token_id!r} among the prompt's token ids, wanted whole numbers; "
                    "pass text or a list of ids"
                )
        if not ids:
            raise RequestError("got an empty list of token ids, wanted at least one; add some")
        return ids

    def _bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it tokenises at the start of a text and after a space, as vLLM does."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            _check_text("a bad word", word)
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._ids("bad_words", text, add_special_tokens=False)
                if ids:
                    found[ids] = None
        return tuple(found)

    def _ids(self, what: str, text: str, **how: bool) -> tuple[int, ...]:
        """A text's ids; RequestError for whatever the tokenizer raises, even a caller's own."""
        tokenizer = self._need_tokenizer(what)
        with answering(
            "a tokenizer that failed", wanted=f"ids for {what}", do="mend it or pass token ids"
        ):
            ids = tokenizer.encode(text, **how)
            return tuple(index(plain(token_id)) for token_id in plain(ids))

    def _check_adapter(self, adapter: object) -> None:
        most = self._num_adapters
        if not isinstance(adapter, int) or isinstance(adapter, bool) or not 0 <= adapter <= most:
            raise RequestError(
                f"got adapter={adapter!r}, wanted 0 for none or one of the engine's {most}; "
                "change it"
            )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"got {what} and no tokenizer, wanted token ids; pass a tokenizer")
        return self.tokenizer


def _ends(tokenizer: Tokenizer | None, config: ModelConfig, num_token_ids: int) -> frozenset[int]:
    """The ids that end a text by the config or the tokenizer, without those the model can't draw.

    Warns of an id past the embedding: a config may have been written for another vocabulary.
    """
    named = {*config.eos_token_ids, *(() if tokenizer is None else tokenizer.eos_token_ids)}
    beyond = sorted(token_id for token_id in named if token_id >= num_token_ids)
    if beyond:
        warnings.warn(
            f"got {len(beyond)} end-of-text ids that the model has no row for, the first "
            f"{beyond[0]} of {num_token_ids} ids; they never end a text",
            stacklevel=2,
        )
    return frozenset(named.difference(beyond))


def as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt | RequestError]:
    """The prompts as a list. One is a text, a list of ids or an array of one axis; several are a
    list of those or an array of two axes. An error stands for an array that can't be read."""
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


def check_prompts(prompts: object) -> None:
    """RequestError for what iterates like prompts but is none, such as another engine's mapping."""
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"got prompts of type {type(prompts).__name__}, wanted text, token ids or a list of "
            "either; pass the text or the ids themselves"
        )


def _plain_or_error(prompt: object) -> Any:
    try:
        return plain(prompt)
    except RequestError as error:
        return error


def _namespace(cache_salt: str | None, adapter: int) -> Namespace:
    """The namespace of a request's prefixes: only requests of the same one share blocks."""
    salt = () if cache_salt is None else (("salt", cache_salt),)
    return (*salt, ("adapter", str(adapter))) if adapter else salt


def _check_labels(request_id: object, priority: object, cache_salt: object) -> None:
    """Checks what requests are kept and ordered by: a wrong type would break the queue for all."""
    if not isinstance(request_id, str):
        raise RequestError(f"got request_id={request_id!r}, wanted a string; change it")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"got priority={priority!r}, wanted a whole number; change it")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(f"got cache_salt={cache_salt!r}, wanted a string or None; change it")


def _check_text(what: str, text: str) -> None:
    """Half a surrogate pair, from JSON or from bytes that are no UTF-8, is no text to encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"got {what} with {text[error.start]!r} at character {error.start}, wanted Unicode "
            "text; write the whole character"
        ) from None
