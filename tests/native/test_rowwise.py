"""The row-by-row kernels against the same in XLA, at sizes that end inside a vector."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import native
from jaxpage.backends.native import Native
from jaxpage.backends.xla import Xla
from jaxpage.errors import ConfigError

NATIVE, XLA = Native(), Xla()


def numbers(*shape: int, spread: float = 1.0) -> np.ndarray:
    return spread * np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 15, 16, 33, 576])
def test_rms_norm(size: int) -> None:
    for rows in (1, 3, 700):
        x, scale = jnp.asarray(numbers(rows, size)), jnp.asarray(numbers(size))
        want = XLA.rms_norm(x, scale, eps=1e-5)
        np.testing.assert_allclose(native.rms_norm(x, scale, eps=1e-5), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 15, 16, 33, 1536])
def test_swiglu(size: int) -> None:
    for rows in (1, 3, 300):
        x = jnp.asarray(numbers(rows, 2 * size, spread=30))
        np.testing.assert_allclose(native.swiglu(x), XLA.swiglu(x), rtol=2e-6, atol=1e-30)


def test_swiglu_of_the_largest_numbers() -> None:
    x = jnp.asarray([[-1e38, -200.0, 200.0, 3e38, np.nan, 1, 1, 1, 0.5, 1]], jnp.float32)
    np.testing.assert_array_equal(native.swiglu(x), np.float32([[0, 0, 200, 1.5e38, np.nan]]))


def test_denormals_count_as_zero_as_in_xla() -> None:
    """XLA computes so on a CPU, in all its threads: what underflows on the way is 0."""
    tiny = np.float32(1e-45)
    assert tiny > 0
    x = jnp.asarray([[tiny, 1.0, 3e38, tiny]], jnp.float32)
    np.testing.assert_array_equal(native.swiglu(x), [[0, 0]])
    np.testing.assert_array_equal(XLA.swiglu(x), [[0, 0]])
    many = jnp.full((300, 2 * 33), tiny).at[:, 33:].set(3e38)  # on more threads than one
    assert not native.swiglu(many).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "group", "size"), [(1, 1, 2), (3, 3, 64), (2, 8, 80), (2, 1, 40)]
)
def test_rope_qkv(heads: int, group: int, size: int) -> None:
    for tokens in (1, 5, 90):
        qkv = jnp.asarray(numbers(tokens, heads, group + 2, size))
        angles = numbers(tokens, size // 2)
        cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
        for got, want in zip(
            native.rope_qkv(qkv, cos, sin), XLA.rope_qkv(qkv, cos, sin), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 15, 16, 33, 257, 49152])
def test_argmax_logsumexp(size: int) -> None:
    for rows in (1, 3, 40):
        x = jnp.asarray(numbers(rows, size, spread=9))
        for got, want in zip(native.argmax_logsumexp(x), XLA.argmax_logsumexp(x), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=2e-6)


def test_argmax_logsumexp_of_equals_and_of_what_is_not_finite() -> None:
    x = np.zeros((8, 600), np.float32)
    x[0, [300, 310, 599]] = 7  # the first of equals
    x[1, 599] = np.nan
    x[2, [20, 500]] = np.nan
    x[3, 450] = np.inf
    x[4] = -np.inf
    x[5, 1:] = -np.inf  # all but one forbidden
    x[6] = 3e38
    x[7] = -3e38
    index, log_sum = native.argmax_logsumexp(jnp.asarray(x))
    np.testing.assert_array_equal(index, [300, 599, 20, 450, 0, 0, 0, 0])
    np.testing.assert_allclose(log_sum, XLA.argmax_logsumexp(jnp.asarray(x))[1], rtol=2e-6)


def test_a_row_is_the_same_to_the_bit_in_any_batch() -> None:
    x, scale = jnp.asarray(numbers(400, 66)), jnp.asarray(numbers(66))
    for kernel in (
        lambda x: native.rms_norm(x, scale, eps=1e-6),
        native.swiglu,
        lambda x: native.argmax_logsumexp(x)[1],
    ):
        whole = np.asarray(kernel(x))
        for first, last in ((0, 1), (123, 140), (399, 400)):
            np.testing.assert_array_equal(kernel(x[first:last]), whole[first:last])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers_keep_their_dtype(dtype: str) -> None:
    x = jnp.asarray(numbers(4, 96)).astype(dtype)
    angles = jnp.zeros((4, 8))
    assert NATIVE.rms_norm(x, x[0], eps=1e-6).dtype == dtype
    assert NATIVE.swiglu(x).dtype == dtype
    for each in NATIVE.rope_qkv(x.reshape(4, 2, 3, 16), angles, angles):
        assert each.dtype == dtype


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: native.rms_norm(jnp.zeros((2, 3)), jnp.zeros(4), eps=1e-6), r"\[T, D\]"),
        (lambda: native.swiglu(jnp.zeros((2, 3))), "2 F"),
        (lambda: native.argmax_logsumexp(jnp.zeros((2, 0))), "V"),
        (lambda: native.rope_qkv(jnp.zeros((2, 1, 2, 4)), *[jnp.zeros((2, 2))] * 2), "G"),
        (lambda: native.rope_qkv(jnp.zeros((2, 1, 3, 4)), *[jnp.zeros((2, 4))] * 2), "cos"),
    ],
)
def test_wrong_operands_are_refused(call: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        call()
