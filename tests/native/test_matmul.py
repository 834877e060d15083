"""Products against float64, at every tile edge, and the same to the bit in any batch."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import native
from jaxpage.backends.native import Native
from jaxpage.backends.xla import Xla
from jaxpage.errors import ConfigError

FEW = native.FEW_ROWS
TOLERANCE = 1e-6
"""Largest error over the norms of the two vectors multiplied."""


def numbers(rows: int, outputs: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((rows, outputs, size))
    x = rng.standard_normal((rows, size), dtype=np.float32)
    return x, rng.standard_normal((outputs, size), dtype=np.float32)


def error(y: jax.Array, x: np.ndarray, w: np.ndarray) -> float:
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None, :]
    return float(np.nan_to_num(np.abs(np.asarray(y) - want) / norms, nan=np.inf).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outputs", "size"), [(1, 1), (13, 40), (64, 96), (67, 24), (3, 37), (17, 1300)]
)
def test_equals_float64(outputs: int, size: int) -> None:
    for rows in (*range(1, 18), 33, 64, 65):
        x, w = numbers(rows, outputs, size)
        assert error(jax.jit(native.matmul)(x, w), x, w) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outputs", "size"), [(1, 1), (32, 16), (31, 40), (97, 24), (65, 37), (17, 1300), (576, 9000)]
)
def test_many_rows_equal_float64(outputs: int, size: int) -> None:
    for rows in (65, 66, 71, 72, 77, 131):
        x, w = numbers(rows, outputs, size)
        assert error(jax.jit(native.matmul)(x, w), x, w) < TOLERANCE


def test_the_tolerance_would_notice() -> None:
    x, w = numbers(5, 13, 40)
    y = native.matmul(jnp.asarray(x), jnp.asarray(w))
    assert error(jnp.zeros_like(y), x, w) > 10 * TOLERANCE
    assert error(native.matmul(jnp.asarray(x), jnp.asarray(w[::-1])), x, w) > 10 * TOLERANCE
    x[:, -1] = 0  # one entry of 40 left out
    assert error(y, x, w) > 10 * TOLERANCE


def test_a_row_is_the_same_to_the_bit_in_any_batch() -> None:
    x, w = numbers(FEW, 61, 1283)
    whole = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))
    for first, last in ((0, 1), (3, 5), (7, 23), (59, 64), (63, 64)):
        part = native.matmul(jnp.asarray(x[first:last]), jnp.asarray(w))
        np.testing.assert_array_equal(np.asarray(part), whole[first:last])


def test_a_row_is_the_same_to_the_bit_in_any_larger_batch() -> None:
    x, w = numbers(700, 61, 1283)  # more than one block of rows
    whole = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))
    for first, last in ((0, 65), (3, 80), (250, 600), (634, 700)):
        part = native.matmul(jnp.asarray(x[first:last]), jnp.asarray(w))
        np.testing.assert_array_equal(np.asarray(part), whole[first:last])


@pytest.mark.parametrize("rows", [6, FEW + 7])
def test_bfloat16_weights_are_read_as_they_are(rows: int) -> None:
    x, w = numbers(rows, 21, 56)
    narrow = jnp.asarray(w).astype(jnp.bfloat16)
    y = native.matmul(jnp.asarray(x), narrow)
    assert error(y, x, np.asarray(narrow.astype(jnp.float32))) < TOLERANCE


@pytest.mark.parametrize("rows", [9, FEW + 9])
def test_a_broken_row_hurts_no_other(rows: int) -> None:
    x, w = numbers(rows, 12, 33)
    good = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))
    x[4] = np.nan
    got = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))
    assert np.isnan(got[4]).all()
    others = np.delete(np.arange(rows), 4)
    np.testing.assert_array_equal(got[others], good[others])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, FEW, FEW + 1])
def test_native_linear_keeps_what_linear_promises(rows: int) -> None:
    x, w = numbers(rows, 12, 16)
    bias = jnp.arange(12, dtype=jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        a, b = jnp.asarray(x).astype(dtype), jnp.asarray(w).astype(dtype)
        got = Native().linear(a, b.reshape(3, 4, 16), bias.reshape(3, 4).astype(dtype))
        want = Xla().linear(a, b, bias.astype(dtype))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=6e-2
        )
        wide = Native().linear(a, b, dtype=jnp.dtype(jnp.float32))
        assert wide.dtype == jnp.float32


@pytest.mark.parametrize(
    ("rows", "outputs", "size"),
    [(0, 3, 4), (3, 0, 4), (100, 0, 4), (3, 4, 0), (100, 4, 0), (0, 0, 0)],
)
def test_matmuls_of_nothing_are_empty_or_zero(rows: int, outputs: int, size: int) -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        y = native.matmul(jnp.ones((rows, size)), jnp.ones((outputs, size), dtype))
        np.testing.assert_array_equal(y, np.zeros((rows, outputs)))


@pytest.mark.slow
def test_one_thread_gives_the_same_bits() -> None:
    """With one processor XLA has one thread: nothing may wait for a second one."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no processor affinity on this system")
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import jax.numpy as jnp, numpy as np\n"
        "from jaxpage import native\n"
        "from tests.native.test_matmul import numbers\n"
        "x, w = numbers(17, 1000, 83)\n"
        "y = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))\n"
        "import sys; sys.stdout.buffer.write(y.tobytes())\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    x, w = numbers(17, 1000, 83)
    y = native.matmul(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_array_equal(
        np.frombuffer(out.stdout, np.float32).reshape(y.shape), np.asarray(y)
    )


@pytest.mark.parametrize(
    ("x", "w", "match"),
    [
        (jnp.zeros((2, 3)), jnp.zeros((4, 5)), r"\[M, D\]"),
        (jnp.zeros((2, 3, 1)), jnp.zeros((4, 1)), r"\[M, D\]"),
        (jnp.zeros((2, 3)), jnp.zeros((4, 3), jnp.float16), "cast"),
    ],
)
def test_wrong_operands_are_refused(x: jax.Array, w: jax.Array, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        native.matmul(x, w)


@pytest.mark.parametrize("shapes", [((2, 8), (0, 8)), ((0, 8), (3, 8)), ((2, 0), (3, 0))], ids=str)
def test_a_product_of_nothing_is_zeros(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    x, w = (jnp.ones(shape) for shape in shapes)
    np.testing.assert_array_equal(native.matmul(x, w), np.zeros((len(x), len(w)), np.float32))
