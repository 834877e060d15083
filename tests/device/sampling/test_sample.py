"""The whole sampler against a float64 oracle, and the promise that draws don't see each other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpage.device.types import StepOutput
from tests.device.sampling.helpers import sample_plain, sample_rows
from tests.device.sampling.oracle import (
    Settings,
    edited_logits,
    log_softmax,
    processed_logprobs,
)

V = 300  # not a whole number of the sampler's blocks, nor of mask words
RNG = np.random.default_rng(5)
LOGITS = (RNG.standard_normal((64, V)) * 3).astype(np.float32)
SEQUENCE = tuple(RNG.integers(0, V, 12).tolist())

MIXED = (
    Settings(temperature=0),
    Settings(temperature=1e-10, top_k=3),
    Settings(temperature=0.7, top_k=5),
    Settings(temperature=1.3, top_p=0.8),
    Settings(temperature=1.0, min_p=0.1),
    Settings(temperature=0.9, min_p=0.01, top_k=40, top_p=0.9),
    Settings(temperature=0, allowed=(3, 7, 200)),
    Settings(temperature=1, allowed=(3, 7, 200), bias={7: 2.5, 9: 50.0}),
    Settings(SEQUENCE, 4, temperature=0, repetition=1.7),
    Settings(SEQUENCE, 4, temperature=1, repetition=0.6, presence=0.5, frequency=1.5),
    Settings(SEQUENCE, 12, temperature=1, frequency=2.0, presence=2.0),
    Settings(SEQUENCE, 4, temperature=1, bad_words=((*SEQUENCE[-2:], 5), (8,))),
    Settings(SEQUENCE, 4, temperature=1, min_tokens=9, stop_ids=(1, 2)),
    Settings(SEQUENCE, 4, temperature=1, min_tokens=8, stop_ids=(1, 2)),
    Settings(temperature=2.0, bias={0: -100.0, V - 1: 4.0}),
    Settings(temperature=1.0),
)


def mixed(count: int) -> list[Settings]:
    return [MIXED[row % len(MIXED)] for row in range(count)]


@pytest.mark.slow
def test_processed_log_probabilities_equal_the_oracle() -> None:
    rows = mixed(64)
    out = sample_rows(LOGITS, rows, seeds=list(range(64)), processed_logprobs=True)
    for row, asked in enumerate(rows):
        want = processed_logprobs(LOGITS[row], asked)
        token = out.token_ids[row]
        assert np.isfinite(want[token]), (row, asked)
        np.testing.assert_allclose(out.logprobs[row], want[token], atol=2e-5)
        best = np.sort(want)[::-1][:20]
        np.testing.assert_allclose(out.top_logprobs[row], best, atol=2e-5)
        live = best > -np.inf
        np.testing.assert_allclose(want[out.top_ids[row]][live], best[live], atol=2e-5)
        raw = log_softmax(LOGITS[row].astype(np.float64))
        np.testing.assert_allclose(out.raw_logprobs[row], raw[token], atol=2e-5)
        if asked.temperature < 1e-5:
            assert token == np.argmax(edited_logits(LOGITS[row], asked)), (row, asked)


@pytest.mark.slow
def test_raw_log_probabilities_are_the_models_own() -> None:
    out = sample_rows(LOGITS, mixed(64), seeds=9)
    np.testing.assert_array_equal(out.logprobs, out.raw_logprobs)
    for row in range(64):
        raw = log_softmax(LOGITS[row].astype(np.float64))
        np.testing.assert_allclose(out.logprobs[row], raw[out.token_ids[row]], atol=2e-5)
        np.testing.assert_array_equal(out.top_ids[row], np.argsort(-raw, kind="stable")[:20])
        np.testing.assert_allclose(out.top_logprobs[row], np.sort(raw)[::-1][:20], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_a_draw_is_bitwise_the_same_in_any_batch(size: int) -> None:
    """Rows 20 .. 20+size alone, in this order and reversed, against all 64 together."""
    whole = _sample(range(64))
    for chosen in (range(20, 20 + size), range(19 + size, 19, -1)):
        part = _sample(chosen)
        for got, want in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(got, want[list(chosen)])


def _sample(chosen: range) -> StepOutput:
    rows = mixed(64)
    logits = np.tile(LOGITS, (1, 14))[:, :4001]
    return sample_rows(
        logits[list(chosen)],
        [rows[row] for row in chosen],
        seeds=list(chosen),
        processed_logprobs=[row % 3 == 0 for row in chosen],
    )


@pytest.mark.slow
def test_edits_and_histories_that_ask_for_nothing_change_no_bit() -> None:
    plain = sample_plain(LOGITS, temperature=0.8, top_p=0.9, seed=list(range(64)))
    rows = [Settings(temperature=0.8, top_p=0.9)] * 64
    edited = sample_rows(LOGITS, rows, seeds=list(range(64)))
    np.testing.assert_array_equal(plain.token_ids, edited.token_ids)
    np.testing.assert_array_equal(plain.logprobs, edited.logprobs)


@pytest.mark.parametrize("temperature", [1e-4, 9e-6, 1e-6, 1e-10, 1e-45])
def test_a_vanishing_temperature_is_greedy_and_never_nan(temperature: float) -> None:
    out = sample_plain(LOGITS, temperature=temperature, processed_logprobs=True)
    np.testing.assert_array_equal(out.token_ids, LOGITS.argmax(-1))
    assert np.isfinite(out.logprobs).all()


def test_greedy_beside_masked_and_sampled_rows_stays_greedy() -> None:
    logits = LOGITS.copy()
    logits[:, ::2] = -np.inf
    out = sample_plain(
        logits, temperature=[0, 1] * 32, top_p=[0.5, 0.5] * 32, processed_logprobs=True
    )
    np.testing.assert_array_equal(out.token_ids[::2], logits[::2].argmax(-1))
    assert (out.token_ids[1::2] % 2 == 1).all()
    assert np.isfinite(out.logprobs).all()


def test_top_k_off_or_of_the_whole_vocabulary_is_the_same() -> None:
    seeds = list(range(64))
    off, whole, huge, one = (
        sample_plain(LOGITS, temperature=1.5, top_k=top_k, seed=seeds).token_ids
        for top_k in (0, V, 2**31 - 1, 1)
    )
    np.testing.assert_array_equal(off, whole)
    np.testing.assert_array_equal(off, huge)
    assert (off != LOGITS.argmax(-1)).any()
    np.testing.assert_array_equal(one, LOGITS.argmax(-1))


def test_seed_sample_and_position_each_give_another_token() -> None:
    flat = np.zeros((64, V), np.float32)
    at = [sample_plain(flat, position=place, temperature=5.0).token_ids[0] for place in range(40)]
    varied = {
        "seed": sample_plain(flat, temperature=5.0, seed=[2**63 + row for row in range(64)]),
        "sample": sample_plain(flat, temperature=5.0, sample_index=list(range(64))),
    }
    for name, out in varied.items():
        assert len(set(out.token_ids.tolist())) > 40, name
    assert len(set(map(int, at))) > 25
    assert len(set(sample_plain(flat, temperature=5.0).token_ids.tolist())) == 1


@pytest.mark.slow
def test_padded_ids_count_for_nothing() -> None:
    logits = LOGITS.copy()
    logits[:, 250:] += 100
    rows = [Settings(SEQUENCE, 4, temperature=t, repetition=1.3) for t in (0.0, 1.0) * 32]
    rows = [row if n % 3 else Settings(temperature=1.0) for n, row in enumerate(rows)]
    out = sample_rows(logits, rows, seeds=3, num_token_ids=250)
    assert out.token_ids.max() < 250
    assert out.top_ids.max() < 250
    raw = log_softmax(logits[0, :250].astype(np.float64))
    np.testing.assert_allclose(out.raw_logprobs[0], raw[out.token_ids[0]], atol=2e-5)


def test_a_draw_with_nothing_allowed_takes_id_0() -> None:
    nothing = [
        Settings(temperature=temperature, allowed=(4,), stop_ids=(4,), min_tokens=3)
        for temperature in (0.0, 1.0)
    ]
    out = sample_rows(LOGITS, nothing + mixed(62), processed_logprobs=True)
    np.testing.assert_array_equal(out.token_ids[:2], 0)
    np.testing.assert_array_equal(out.logprobs[:2], -np.inf)
    assert np.isfinite(out.raw_logprobs).all()
    assert np.isfinite(out.logprobs[2:]).all()


def test_a_draw_with_nan_logits_hurts_no_other() -> None:
    logits = LOGITS.copy()
    logits[3] = np.nan
    seeds = list(range(64))
    good = sample_plain(LOGITS, temperature=1.0, top_k=9, top_p=0.9, seed=seeds)
    bad = sample_plain(logits, temperature=1.0, top_k=9, top_p=0.9, seed=seeds)
    others = np.arange(64) != 3
    np.testing.assert_array_equal(good.token_ids[others], bad.token_ids[others])
    assert 0 <= bad.token_ids[3] < V


@pytest.mark.slow
def test_more_alternatives_than_ids_are_as_many_as_there_are() -> None:
    out = sample_rows(LOGITS[:2, :7], mixed(2))
    assert out.top_ids.shape == (2, 7)
    np.testing.assert_allclose(np.exp(out.top_logprobs).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_tokens_follow_their_distribution(top_p: float) -> None:
    """Chi-square of 64 x 64 draws with fixed seeds; dropped ids never come."""
    logits = np.full((64, V), -np.inf, np.float32)
    logits[:, 100:140] = RNG.standard_normal(40) * 1.5
    counts = np.zeros(V)
    for position in range(64):
        out = sample_plain(
            logits, position=position, temperature=1.2, top_p=top_p, seed=list(range(64))
        )
        counts += np.bincount(out.token_ids, minlength=V)
    wanted = Settings(temperature=1.2, top_p=top_p)
    expected = counts.sum() * np.exp(processed_logprobs(logits[0], wanted))
    alive = expected > 0
    assert counts[~alive].sum() == 0
    chi = ((counts - expected)[alive] ** 2 / expected[alive]).sum()
    freedom = alive.sum() - 1
    assert abs(chi - freedom) < 3.5 * np.sqrt(2 * freedom), (chi, freedom)
