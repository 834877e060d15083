"""Frozen, validated settings of one request. Names, defaults and meaning are vLLM's.

Differences: `top_k=0` and `-1` both mean off; `stop` with `detokenize=False` is refused
instead of ignored; a logit bias is taken as given, not clamped to [-100, 100], and so is a
temperature between 0 and 0.01, which vLLM raises to 0.01 (under 1e-5 it is greedy); logprobs
False is refused, not 0. As there: seed -1 is None, logprobs True is 1, temperatures may be over 2.

Numbers and ids may be those of NumPy, jax or torch: scalars, and arrays where a list is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from jaxpage.errors import RequestError
from jaxpage.numbers import plain

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for beside each token, as in vLLM."""
MAX_SEED = 2**64 - 1
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


class FrozenBias(Mapping[int, float]):
    """An immutable logit bias, so that settings with one can be hashed and compared."""

    __slots__ = ("_hash", "_pairs")

    def __init__(self, pairs: Mapping[int, float]) -> None:
        self._pairs = dict(pairs)
        self._hash = hash(frozenset(self._pairs.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._pairs[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    Raises RequestError when a value is out of its range. Ids are checked against the
    vocabulary at submission, where it is known.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """None, or -1: a stream of its own, taken from the engine's seed."""
    max_tokens: int | None = 16
    """None: up to the model's limit. 0: only score the prompt."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Alternatives beside each token, True is 1; 0: the token's own log-probability alone."""
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """raw: log_softmax of the model's logits; processed: of what the token was drawn from."""
    presence_penalty: float = 0.0
    """Over output tokens only, as frequency_penalty; repetition_penalty sees the prompt too."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: tuple[Callable[..., Any], ...] = ()
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)
    """Settings of sampler stages of the caller's own, by name; nothing here reads them."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        _make_plain(self)
        put(self, "extra_args", _extra(self.extra_args))
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logits_processors or (), Iterable):
            raise _wrong("logits_processors", self.logits_processors, "a list of functions")
        put(self, "logits_processors", tuple(self.logits_processors or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _wrong("allowed_token_ids", (), "at least one id, or None to allow all")
        if self.logit_bias is not None:
            put(self, "logit_bias", _bias(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                put(self, name, 1)
        if self.seed == -1:
            put(self, "seed", None)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        self._check_counts()
        self._check_numbers()

    def _check_counts(self) -> None:
        _whole("n", self.n, 1)
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n)
        _whole("top_k", self.top_k, -1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _wrong("top_p", 0.0, "more than 0 and at most 1; for greedy use temperature=0")
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise _wrong("repetition_penalty", 0.0, "more than 0; 1 is off")
        if self.logprobs_mode not in ("raw", "processed"):
            raise _wrong("logprobs_mode", self.logprobs_mode, "'raw' or 'processed'")
        if self.stop and not self.detokenize:
            raise _wrong("stop", self.stop, "detokenize=True with stop strings: text is searched")
        if self.temperature == 0.0 and self.num_sequences > 1:
            raise _wrong("n", self.num_sequences, "1 at temperature 0: the samples are all equal")

    @property
    def num_sequences(self) -> int:
        """Completions drawn: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search as Hugging Face `generate(num_beams=beam_width)` does it."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        _make_plain(self)
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _whole("beam_width", self.beam_width, 1)
        _whole("max_tokens", self.max_tokens, 1)
        _real("length_penalty", self.length_penalty, -math.inf, math.inf)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _wrong("early_stopping", self.early_stopping, "True, False or 'never'")
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "True or False")


def _make_plain(params: SamplingParams | BeamSearchParams) -> None:
    for each in fields(params):
        object.__setattr__(params, each.name, plain(getattr(params, each.name)))


def _wrong(name: str, got: object, wanted: str) -> RequestError:
    return RequestError(f"got {name}={got!r}, wanted {wanted}; change {name}")


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        until = "" if high is None else f" and at most {high}"
        raise _wrong(name, value, f"a whole number of at least {low}{until}")


def _real(name: str, value: object, low: float, high: float) -> None:
    """Checks a number's range; refuses also what float32, used on the device, can't hold."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not low <= value <= high
        or not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32
    ):
        span = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise _wrong(name, value, "a finite number" + ("" if low == -math.inf else f" {span}"))


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise _wrong(name, value, "a string or a list of strings")
    items = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise _wrong(name, item, "non-empty strings")
    return items


def _ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise _wrong(name, value, "a list of token ids")
    items = tuple(plain(item) for item in (() if value is None else value))
    for item in items:
        _whole(name, item, 0)
    return cast("tuple[int, ...]", items)


def _extra(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong("extra_args", value, "a mapping of names to settings")
    return dict(value)


def _bias(value: Mapping[int, float]) -> FrozenBias:
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, "a mapping of token id to a number")
    pairs = {plain(token_id): plain(bias) for token_id, bias in value.items()}
    for token_id, bias in pairs.items():
        _whole("logit_bias id", token_id, 0)
        _real("logit_bias value", bias, -math.inf, math.inf)
    return FrozenBias(pairs)
