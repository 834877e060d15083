"""What callers without an engine write about their draws."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.device.sampling.settings import (
    draw_history,
    greedy_sampling,
    logit_edits,
    sampling_input,
)
from jaxpage.errors import ConfigError


def test_a_number_stands_for_all_draws_and_a_list_for_each() -> None:
    got = sampling_input(3, temperature=[0, 0.5, 1], top_k=7, seed=2**40 + 3)
    assert got.temperature.tolist() == [0, 0.5, 1]
    assert got.top_k.tolist() == [7, 7, 7]
    assert got.seed_words.tolist() == [[2**8, 3]] * 3
    assert got.temperature.dtype == np.float32
    assert got.seed_words.dtype == np.uint32


def test_greedy_asks_for_nothing() -> None:
    got = greedy_sampling(2)
    assert got.temperature.tolist() == [0, 0]
    assert got.top_p.tolist() == [1, 1]
    assert got.states == (None, None)


def test_edits_are_padded_with_an_id_that_is_dropped() -> None:
    edits = logit_edits(
        2, 40, bias=[{3: 1.5, 7: -2}, {}], allowed=[None, [0, 33]], stop_ids=[[1], []]
    )
    assert edits.bias_ids.tolist() == [[3, 7], [40, 40]]
    assert edits.bias_values.tolist() == [[1.5, -2], [0, 0]]
    assert edits.allowed.tolist() == [[2**32 - 1, 2**32 - 1], [1, 2]]
    assert edits.stop_ids.tolist() == [[1], [40]]


def test_histories_are_padded_and_bad_words_right_aligned() -> None:
    history = draw_history(
        2, 40, tokens=[[1, 2, 3], []], prompt_lens=[2, 1], bad_words=[[[5], [6, 7]], []]
    )
    assert history.tokens.tolist() == [[1, 2, 3], [40, 40, 40]]
    assert history.lengths.tolist() == [3, 0]
    assert history.bad_words.tolist() == [[[41, 5], [6, 7]], [[41, 41], [41, 41]]]
    assert history.bad_word_lens.tolist() == [[1, 2], [0, 0]]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="2 values of top_k, wanted a number or one"):
        sampling_input(3, top_k=[1, 2])
    with pytest.raises(ConfigError, match="seeds"):
        sampling_input(1, seed=-1)
    with pytest.raises(ConfigError, match="1 lists, wanted one for each of 2"):
        logit_edits(2, 40, stop_ids=[[1]])
