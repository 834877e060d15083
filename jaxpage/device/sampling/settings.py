"""Builds a SamplingInput from numbers and lists: what a caller without an engine writes.

All of it happens in NumPy and goes to the device in one transfer. A number holds for all draws,
a list has one entry a draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxpage.device.placement import put
from jaxpage.device.types import History, LogitEdits, SamplingInput
from jaxpage.errors import ConfigError

Number = int | float
Numbers = Number | Sequence[Number]
Ints = int | Sequence[int]


def greedy_sampling(num_draws: int) -> SamplingInput:
    """Every draw takes its most likely token."""
    return sampling_input(num_draws)


def sampling_input(
    num_draws: int,
    *,
    temperature: Numbers = 0.0,
    top_k: Ints = 0,
    top_p: Numbers = 1.0,
    min_p: Numbers = 0.0,
    seed: Ints = 0,
    sample_index: Ints = 0,
    processed_logprobs: bool | Sequence[bool] = False,
    edits: LogitEdits | None = None,
    history: History | None = None,
) -> SamplingInput:
    """The settings of `num_draws` draws; seeds have up to 64 bits. Defaults are greedy, all off."""
    seeds = [seed] * num_draws if isinstance(seed, int) else list(seed)
    if any(not 0 <= value < 2**64 for value in seeds):
        raise ConfigError(f"got seeds {seeds}, wanted whole numbers from 0 to 2**64 - 1")
    words = np.array([divmod(value, 2**32) for value in seeds], np.uint32)
    return put(
        SamplingInput(
            temperature=_each("temperature", temperature, num_draws, np.float32),
            top_k=_each("top_k", top_k, num_draws, np.int32),
            top_p=_each("top_p", top_p, num_draws, np.float32),
            min_p=_each("min_p", min_p, num_draws, np.float32),
            seed_words=_each("seed", words, num_draws, np.uint32),
            sample_index=_each("sample_index", sample_index, num_draws, np.int32),
            processed_logprobs=_each("processed_logprobs", processed_logprobs, num_draws, np.bool_),
            states=(edits, history),
        )
    )


def logit_edits(
    num_draws: int,
    vocab_size: int,
    *,
    bias: Sequence[Mapping[int, Number]] | None = None,
    allowed: Sequence[Iterable[int] | None] | None = None,
    stop_ids: Sequence[Sequence[int]] | None = None,
    min_position: Ints = 0,
) -> LogitEdits:
    """Edits of `num_draws` draws, one entry a draw; an entry None allows all ids."""
    bias = bias or [{}] * num_draws
    allowed = allowed or [None] * num_draws
    masks = np.zeros((num_draws, -(-vocab_size // 32) * 32), np.uint8)
    for mask, ids in zip(masks, allowed, strict=True):
        mask[slice(None) if ids is None else list(ids)] = 1
    return LogitEdits(
        bias_ids=_padded([list(entry) for entry in bias], num_draws, vocab_size, np.int32),
        bias_values=_padded([list(entry.values()) for entry in bias], num_draws, 0, np.float32),
        allowed=np.packbits(masks, axis=1, bitorder="little").view("<u4"),
        stop_ids=_padded(stop_ids or [[]] * num_draws, num_draws, vocab_size, np.int32),
        min_position=_each("min_position", min_position, num_draws, np.int32),
    )


def draw_history(
    num_draws: int,
    vocab_size: int,
    *,
    tokens: Sequence[Sequence[int]],
    prompt_lens: Ints,
    presence: Numbers = 0.0,
    frequency: Numbers = 0.0,
    repetition: Numbers = 1.0,
    bad_words: Sequence[Sequence[Sequence[int]]] | None = None,
) -> History:
    """Histories of `num_draws` draws: `tokens` are those before each draw's last one."""
    bad_words = bad_words or [[]] * num_draws
    longest = max((len(word) for words in bad_words for word in words), default=1)
    most = max(1, *(len(words) for words in bad_words), 1)
    ids = np.full((num_draws, most, longest), vocab_size + 1, np.int32)
    lengths = np.zeros((num_draws, most), np.int32)
    for row, words in enumerate(bad_words):
        for place, word in enumerate(words):
            ids[row, place, longest - len(word) :] = word
            lengths[row, place] = len(word)
    return History(
        tokens=_padded(tokens, num_draws, vocab_size, np.int32),
        lengths=_each("tokens", [len(entry) for entry in tokens], num_draws, np.int32),
        prompt_lens=_each("prompt_lens", prompt_lens, num_draws, np.int32),
        presence=_each("presence", presence, num_draws, np.float32),
        frequency=_each("frequency", frequency, num_draws, np.float32),
        repetition=_each("repetition", repetition, num_draws, np.float32),
        bad_words=ids,
        bad_word_lens=lengths,
    )


def _each(name: str, value: object, num_draws: int, dtype: type[np.generic]) -> np.ndarray:
    """[R, ...] of a number for all draws or of one entry a draw."""
    given = np.asarray(value)
    if given.ndim and len(given) != num_draws:
        raise ConfigError(
            f"got {len(given)} values of {name}, wanted a number or one for each of {num_draws}"
        )
    array = np.empty((num_draws, *given.shape[1:]), dtype)
    array[...] = given
    return array


def _padded(
    lists: Sequence[Sequence[Number]], num_draws: int, padding: Number, dtype: type[np.generic]
) -> np.ndarray:
    """[R, longest] of lists of different lengths; at least one column wide."""
    if len(lists) != num_draws:
        raise ConfigError(f"got {len(lists)} lists, wanted one for each of {num_draws} draws")
    width = max(1, *(len(entry) for entry in lists), 1)
    array = np.full((num_draws, width), padding, dtype)
    for row, entry in enumerate(lists):
        array[row, : len(entry)] = entry
    return array
