"""From what a caller hands over to a checked Request: token ids, a seed, the ids that end it."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import index

from jaxpage.config import ModelConfig
from jaxpage.engine.detokenize import Detokenizer
from jaxpage.engine.sampling_batch import check_fits
from jaxpage.errors import RequestError
from jaxpage.host.plan import Request
from jaxpage.later import check_available
from jaxpage.numbers import plain
from jaxpage.reading import answering
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.tokenizer import ChatPrompt, Tokenizer


class RequestFactory:
    """Builds the requests of one engine; `seed` starts the stream that unseeded requests use."""

    def __init__(
        self, tokenizer: Tokenizer | None, config: ModelConfig, *, num_token_ids: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
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
    ) -> Request:
        """The checked request. Raises RequestError, or ConfigError for a later feature."""
        params = check_available(params)
        priority = plain(priority)
        _check_labels(request_id, priority, cache_salt)
        beam = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=params.max_tokens,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            )
        drawn = self._seeds.getrandbits(64)  # drawn always: a seed shifts nobody else's stream
        if params.stop:  # searched in the text, which there would be none of
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
            namespace=() if cache_salt is None else (("salt", cache_salt),),
            beam=beam,
        )
        check_fits(request, self._num_token_ids)
        return request

    def detokenizer(self, request: Request) -> Detokenizer | None:
        """A fresh detokeniser for one completion; None when no text is wanted or possible."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def encode_completion(self, completion: str | Seq[int]) -> tuple[int, ...]:
        """The ids of what follows a prompt: of text without special tokens at its start."""
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
            # of a chat's prompt a caller's own tokenizer doesn't know
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
        """A text's ids; RequestError for whatever the tokenizer raises, which may be anybody's."""
        tokenizer = self._need_tokenizer(what)
        with answering(
            "a tokenizer that failed", wanted=f"ids for {what}", do="mend it or pass token ids"
        ):
            ids = tokenizer.encode(text, **how)
            return tuple(index(plain(token_id)) for token_id in plain(ids))

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"got {what} and no tokenizer, wanted token ids; pass a tokenizer")
        return self._tokenizer


def _ends(tokenizer: Tokenizer | None, config: ModelConfig, num_token_ids: int) -> frozenset[int]:
    """The ids that end a text by the config or the tokenizer, without those the model can't draw.

    One past its embedding is warned of; a config is often that of another vocabulary.
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


def check_prompts(prompts: object) -> None:
    """RequestError for what would be taken for prompts and is none, as another engine's mapping."""
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"got prompts of type {type(prompts).__name__}, wanted text, token ids or a list of "
            "either; pass the text or the ids themselves"
        )


def _check_labels(request_id: object, priority: object, cache_salt: object) -> None:
    """What requests are kept and ordered by: a wrong one would upset the queue for everybody."""
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
