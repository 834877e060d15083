"""Thresholds without sorting, against sorting: any scores, ties and forbidden ids included."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.device.sampling import truncation
from tests.device.sampling.oracle import kept

WIDTH = 256
SIZE = 25 * WIDTH  # more blocks than the near search looks at, so that the far one runs too
run = jax.jit(lambda scores, **settings: truncation.truncate(scores, **settings))


def _kept(scores: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    out = run(
        scores.reshape(-1, WIDTH),
        top_k=np.int32(top_k),
        top_p=np.float32(top_p),
        min_p=np.float32(min_p),
    )
    out = np.asarray(out).reshape(-1)
    survivors = out > -np.inf
    np.testing.assert_array_equal(out[survivors], scores[survivors])
    return survivors


@st.composite
def _scores(draw: st.DrawFn) -> np.ndarray:
    """Shifted scores with ties (a coarse grid), forbidden ids and any spread."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = rng.standard_normal(SIZE) * draw(st.sampled_from([1e-6, 0.1, 3.0, 40.0]))
    if draw(st.booleans()):
        scores = np.round(scores * 2) / 2
    scores[rng.random(scores.size) < draw(st.sampled_from([0.0, 0.5, 0.999]))] = -np.inf
    scores[rng.integers(scores.size)] = 45.0
    return (scores - scores.max()).astype(np.float32)


@given(
    scores=_scores(),
    top_k=st.sampled_from([0, 1, 2, 40, 64, 65, 700, SIZE, 10**6]),
    min_p=st.sampled_from([0.0, 1e-9, 0.02, 0.4, 1.0]),
)
def test_top_k_and_min_p_keep_what_a_sort_keeps(
    scores: np.ndarray, top_k: int, min_p: float
) -> None:
    got = _kept(scores, top_k=top_k, top_p=1.0, min_p=min_p)
    want = kept(scores.astype(np.float64), top_k=top_k, top_p=1.0, min_p=min_p)
    edge = np.isclose(np.exp(scores.astype(np.float64)), min_p, rtol=1e-5)
    np.testing.assert_array_equal(got | edge, want | edge)


@given(
    scores=_scores(),
    top_k=st.sampled_from([0, 3, 64, 500]),
    top_p=st.floats(1e-6, 1.0, exclude_max=True),
)
def test_top_p_keeps_what_a_sort_keeps(scores: np.ndarray, top_k: int, top_p: float) -> None:
    """Between what the sort keeps for slightly less and for slightly more mass."""
    got = _kept(scores, top_k=top_k, top_p=top_p, min_p=0.0)
    least, most = (
        kept(scores.astype(np.float64), top_k=top_k, top_p=p, min_p=0.0)
        for p in (top_p * (1 - 1e-5), min(1.0, top_p * (1 + 1e-5)))
    )
    assert (got >= least).all()
    assert (got <= most).all()
    assert got[scores.argmax()]


def test_far_and_near_thresholds_were_both_met() -> None:
    """The searches that the tests above are about happen: near for few ids, far for many."""
    scores = np.linspace(0, -1, SIZE, dtype=np.float32)
    for count in (1, 64, 65, 3000):
        assert _kept(scores, top_k=count, top_p=1.0, min_p=0.0).sum() == count
    assert 1 <= _kept(scores, top_k=0, top_p=1e-3, min_p=0.0).sum() < 64
    assert 3000 < _kept(scores, top_k=0, top_p=0.9, min_p=0.0).sum() < SIZE


def test_nothing_asked_keeps_all() -> None:
    scores = np.linspace(0, -80, SIZE, dtype=np.float32)
    scores[5] = -np.inf
    got = _kept(scores, top_k=0, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(got, scores > -np.inf)
