"""The settings of a plan's draws as device arrays: one row a draw, padded to a rung.

Settings change only when the batch does, so they stay on the device until it does; what changes
with every token (the histories of penalties and bad words) is sent only when a draw asks for it.

Each change that settings make to logits is a `Stage` of the sampler: how settings become arrays,
and what those do on the device. `STAGES` are those of SamplingParams; an engine may be given more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxpage.config import EngineConfig
from jaxpage.device.placement import Placement
from jaxpage.device.sampling.logit_edits import edit_logits
from jaxpage.device.sampling.penalties import penalise
from jaxpage.device.sampling.sample import Apply
from jaxpage.device.types import History, LogitEdits, SamplingInput
from jaxpage.errors import RequestError
from jaxpage.host.beam import num_candidates
from jaxpage.host.ladder import Ladder
from jaxpage.host.plan import Draw, Request
from jaxpage.sampling_params import MAX_LOGPROBS

MAX_BIAS_IDS = 1024
"""Most entries of one request's logit_bias."""
MAX_STOP_IDS = 64
"""Most ids that min_tokens holds back: end-of-text ids and stop_token_ids together."""
MAX_BAD_WORDS = 64
"""Most token sequences of one request's bad_words; a word counts with and without a space."""
MAX_BAD_WORD_TOKENS = 16
"""Most tokens of one word. Each of these four bounds the length of an axis of a batch's arrays."""
SHORT_HISTORY_TOKENS = 512
"""Samplers are compiled for two lengths of history, this one and max_model_len: most requests never
outgrow the shorter."""
TOP_LADDER = Ladder((MAX_LOGPROBS, 64, 512))
"""Alternatives that samplers are compiled for: those of logprobs, and candidates of wide beams."""
_MAX_INT32 = 2**31 - 1
REMEMBERED_BATCHES = 4
"""Batches whose settings stay on the device, so that decode finds its own after a prefill."""


class Limits(NamedTuple):
    """What bounds the arrays of a stage."""

    vocab_size: int
    """V, the number of logits."""
    history_tokens: Ladder
    """Lengths that a draw's history is padded to."""


class Stage(NamedTuple):
    """One stage of the sampler."""

    pack: Callable[[tuple[Draw, ...], int, Limits], Any | None]
    """(draws, R, limits) to a pytree of NumPy arrays [R, ...], whose padding rows change nothing;
    None where no draw asks for the stage, which its settings alone decide. Fixed shapes make few
    programs."""
    apply: Apply
    """Traced: (logits [R, V], the packed state, DrawInput) to logits [R, V]."""
    changes: bool = False
    """Whether the state changes with every token, so that each step asks for it and sends it: from
    one step to the next there may be none, or one again."""


class CachedSettings(NamedTuple):
    """The settings of a batch that stay the same from step to step."""

    draws: tuple[Draw, ...]
    """The draws that it was made for."""
    sampling: SamplingInput
    changing: tuple[int, ...]
    """The places of the stages that are packed for every step."""
    num_top: int


class SamplingBuilder:
    """Builds the SamplingInput of a step; `vocab_size` is the number of logits."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        placement: Placement,
        stages: tuple[Stage, ...],
    ) -> None:
        longest = config.max_model_len
        history = Ladder(tuple(sorted({min(SHORT_HISTORY_TOKENS, longest), longest})))
        self._limits = Limits(vocab_size, history)
        self._put = placement.put
        self._stages = stages
        self._cached: dict[tuple[int, tuple[int, ...]], CachedSettings] = {}
        """By number of rows and sequence ids; the last used comes last."""

    def build(self, draws: tuple[Draw, ...], num_draws: int) -> tuple[SamplingInput, int]:
        """(the settings padded to `num_draws` rows, alternatives the program must return)."""
        key = (num_draws, tuple(draw.seq_id for draw in draws))
        cached = self._cached.pop(key, None)
        if cached is None or not all(map(_same_settings, cached.draws, draws)):
            cached = self._cache_settings(draws, num_draws)
            self._cached = dict(list(self._cached.items())[1 - REMEMBERED_BATCHES :])
        self._cached[key] = cached
        if not cached.changing:
            return cached.sampling, cached.num_top
        packed = {place: self._pack(place, draws, num_draws) for place in cached.changing}
        if all(state is None for state in packed.values()):
            return cached.sampling, cached.num_top
        states = list(cached.sampling.states)
        for place, state in packed.items():
            states[place] = self._put(state)
        return replace(cached.sampling, states=tuple(states)), cached.num_top

    def _cache_settings(self, draws: tuple[Draw, ...], num_draws: int) -> CachedSettings:
        wanted = max(draw.num_candidates or draw.params.logprobs or 0 for draw in draws)
        states = [
            None if stage.changes else self._pack(place, draws, num_draws)
            for place, stage in enumerate(self._stages)
        ]
        changing = tuple(place for place, stage in enumerate(self._stages) if stage.changes)
        settings = replace(self._settings(draws, num_draws), states=tuple(states))
        return CachedSettings(
            draws=draws,
            sampling=self._put(settings),
            changing=changing,
            num_top=TOP_LADDER.fit(wanted) if wanted else 0,
        )

    def _pack(self, place: int, draws: tuple[Draw, ...], num_draws: int) -> Any | None:
        return self._stages[place].pack(draws, num_draws, self._limits)

    def _settings(self, draws: tuple[Draw, ...], num_draws: int) -> SamplingInput:
        count = len(draws)
        params = [draw.params for draw in draws]
        settings = SamplingInput(
            temperature=np.zeros(num_draws, np.float32),
            top_k=np.zeros(num_draws, np.int32),
            top_p=np.ones(num_draws, np.float32),
            min_p=np.zeros(num_draws, np.float32),
            seed_words=np.zeros((num_draws, 2), np.uint32),
            sample_index=np.zeros(num_draws, np.int32),
            processed_logprobs=np.zeros(num_draws, np.bool_),
        )
        settings.temperature[:count] = [p.temperature for p in params]
        settings.top_k[:count] = [min(max(p.top_k, 0), self._limits.vocab_size) for p in params]
        settings.top_p[:count] = [p.top_p for p in params]
        settings.min_p[:count] = [p.min_p for p in params]
        settings.seed_words[:count] = [divmod(draw.seed, 1 << 32) for draw in draws]
        settings.sample_index[:count] = [draw.sample_index for draw in draws]
        settings.processed_logprobs[:count] = [p.logprobs_mode == "processed" for p in params]
        return settings


def pack_edits(draws: tuple[Draw, ...], num_draws: int, limits: Limits) -> LogitEdits | None:
    """logit_bias, allowed_token_ids and min_tokens."""
    if not any(_edits_logits(draw) for draw in draws):
        return None
    words = -(-limits.vocab_size // 32)
    edits = LogitEdits(
        bias_ids=np.full((num_draws, MAX_BIAS_IDS), limits.vocab_size, np.int32),
        bias_values=np.zeros((num_draws, MAX_BIAS_IDS), np.float32),
        allowed=np.full((num_draws, words), 0xFFFFFFFF, np.uint32),
        stop_ids=np.full((num_draws, MAX_STOP_IDS), limits.vocab_size, np.int32),
        min_position=np.zeros(num_draws, np.int32),
    )
    for row, draw in enumerate(draws):
        params = draw.params
        for place, (token_id, bias) in enumerate((params.logit_bias or {}).items()):
            edits.bias_ids[row, place] = token_id
            edits.bias_values[row, place] = bias
        if params.allowed_token_ids is not None:
            edits.allowed[row] = _bit_mask(params.allowed_token_ids, words)
        if params.min_tokens:
            edits.stop_ids[row, : len(draw.stop_token_ids)] = draw.stop_token_ids
            edits.min_position[row] = min(draw.prompt_len + params.min_tokens, _MAX_INT32)
    return edits


def pack_history(draws: tuple[Draw, ...], num_draws: int, limits: Limits) -> History | None:
    """Penalties and bad_words."""
    if not any(draw.params.needs_history for draw in draws):
        return None
    longest = max(len(draw.history) for draw in draws)
    width = limits.history_tokens.fit(max(1, longest))
    history = History(
        tokens=np.full((num_draws, width), limits.vocab_size, np.int32),
        lengths=np.zeros(num_draws, np.int32),
        prompt_lens=np.zeros(num_draws, np.int32),
        presence=np.zeros(num_draws, np.float32),
        frequency=np.zeros(num_draws, np.float32),
        repetition=np.ones(num_draws, np.float32),
        bad_words=np.full(
            (num_draws, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), limits.vocab_size + 1, np.int32
        ),
        bad_word_lens=np.zeros((num_draws, MAX_BAD_WORDS), np.int32),
    )
    for row, draw in enumerate(draws):
        params = draw.params
        if not params.needs_history:
            continue
        history.tokens[row, : len(draw.history)] = draw.history
        history.lengths[row] = len(draw.history)
        history.prompt_lens[row] = draw.prompt_len
        history.presence[row] = params.presence_penalty
        history.frequency[row] = params.frequency_penalty
        history.repetition[row] = params.repetition_penalty
        for place, word in enumerate(draw.bad_word_ids):
            history.bad_words[row, place, -len(word) :] = word
            history.bad_word_lens[row, place] = len(word)
    return history


STAGES = (Stage(pack_edits, edit_logits), Stage(pack_history, penalise, changes=True))
"""Those of SamplingParams, in order."""


def check_fits(request: Request, vocab_size: int) -> None:
    """Raises RequestError when a request's settings name ids or counts no step can hold."""
    params = request.params
    held_back = request.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else ()
    _check_ids("prompt ids", request.prompt_token_ids, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("logit_bias ids", tuple(params.logit_bias or ()), vocab_size)
    _check_count("logit_bias entries", len(params.logit_bias or ()), MAX_BIAS_IDS)
    _check_count("end and stop ids with min_tokens", len(held_back), MAX_STOP_IDS)
    _check_count("bad_words as token sequences", len(request.bad_word_ids), MAX_BAD_WORDS)
    if request.beam is not None:
        wanted = num_candidates(request.beam, request.end_ids)
        _check_count("candidates of a beam search a step", wanted, TOP_LADDER.sizes[-1])
    longest = max((len(word) for word in request.bad_word_ids), default=0)
    _check_count("tokens of a bad word", longest, MAX_BAD_WORD_TOKENS)


def _same_settings(old: Draw, new: Draw) -> bool:
    """Whether two draws of one sequence id agree in all that stays from step to step.

    They do if both come from one scheduler; a new one counts its sequence ids from 1 again.
    """
    return old is new or (
        (old.params is new.params or old.params == new.params)
        and (old.seed, old.sample_index) == (new.seed, new.sample_index)
        and (old.prompt_len, old.stop_token_ids) == (new.prompt_len, new.stop_token_ids)
        and old.num_candidates == new.num_candidates
    )


def _edits_logits(draw: Draw) -> bool:
    params = draw.params
    return bool(params.logit_bias or params.allowed_token_ids is not None or params.min_tokens)


def _bit_mask(ids: tuple[int, ...], words: int) -> np.ndarray:
    bits = np.zeros(words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise RequestError(
            f"got {name} with {wrong[0]}, wanted ids from 0 to {vocab_size - 1} (the vocabulary); "
            "leave it out"
        )


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"got {count} {name}, wanted at most {most}; use fewer")
