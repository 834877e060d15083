"""The contract of the attention kernels: random ragged calls against float64, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pallas_kernels.cases import (
    LSE_TOLERANCE,
    TOLERANCES,
    Wrong,
    draw,
    run,
    worst_error,
    worst_lse_error,
)
from tests.pallas_kernels.settings import DRAWS, SETTINGS

BACKENDS = ("reference", "interpret", pytest.param("gpu", marks=pytest.mark.gpu))


QUICK = ("decode 7B", "prefill 7B")
"""The rest is marked slow."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_equals_dense_attention(backend: str, name: str) -> None:
    setting = SETTINGS[name]
    for seed in range(DRAWS if backend != "reference" else 2):
        call = draw(setting, seed)
        out, lse = run(backend, setting, call)
        assert worst_error(out, call.expected) < TOLERANCES[setting.dtype], seed
        assert worst_lse_error(lse, call.expected_lse) < LSE_TOLERANCE, seed
        assert not out[~call.expected.any((1, 2))].any(), seed  # exactly 0, not nearly


WRONG = {
    "K for V": Wrong(swaps_k_and_v=True),
    "mask one token short": Wrong(last_token_off=-1),
    "heads shifted by one": Wrong(heads_shifted=1),
}
WATCHED = (
    "decode group 9",
    "decode 8B bf16",
    "decode group 8 f16",
    "prefill 7B",
    "prefill SmolLM2 bf16",
    "prefill group 8 f16",
    "prefix window",
    "prefix SmolLM2 bf16",
)


@pytest.mark.parametrize("name", WATCHED)
def test_the_tolerance_rejects_wrong_answers(name: str) -> None:
    setting = SETTINGS[name]
    tolerance = TOLERANCES[setting.dtype]
    for seed in range(DRAWS):
        call = draw(setting, seed)
        assert worst_error(np.zeros_like(call.expected), call.expected) > 10 * tolerance
        nan = call.expected.copy()
        nan[call.expected.any((1, 2)).argmax(), 0, 0] = np.nan
        assert worst_error(nan, call.expected) == np.inf
        for wrong in WRONG.values():
            answer = draw(setting, seed, wrong)
            assert worst_error(answer.expected, call.expected) > 5 * tolerance, wrong


@pytest.mark.parametrize("name", ["prefill group 9", "prefill SmolLM2 bf16"])
def test_the_tolerance_rejects_a_future_token(name: str) -> None:
    setting = SETTINGS[name]
    call, ahead = draw(setting, 0), draw(setting, 0, Wrong(last_token_off=1))
    assert worst_error(ahead.expected, call.expected) > 5 * TOLERANCES[setting.dtype]


def test_an_error_in_one_small_row_is_not_hidden_by_a_large_one() -> None:
    expected = np.ones((2, 1, 4)) * np.array([1e3, 1e-3])[:, None, None]
    got = expected.copy()
    got[1, 0, 0] *= 1.01
    assert worst_error(got, expected) == pytest.approx(0.01)
