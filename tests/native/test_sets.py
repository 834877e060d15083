"""Each set of instructions that this processor has: right, and the same to the bit in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import native
from jaxpage.native.library import require
from tests.backends import test_attention as contract
from tests.native import test_attention, test_matmul, test_rowwise

FEW = native.FEW_ROWS


@pytest.fixture(autouse=True, params=["avx512", "avx2", "portable"])
def chosen(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.instruction_set()
    if not require().jaxpage_choose_set(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    assert native.instruction_set() == request.param
    yield
    require().jaxpage_choose_set(before.encode())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [3, 83, 663])
def test_a_row_of_a_product_is_the_same_in_any_batch(size: int, dtype: str) -> None:
    """Sizes that end inside a vector, and outputs that end inside a panel of any set."""
    x, w = test_matmul.numbers(FEW, 13, size)
    weights = jnp.asarray(w).astype(dtype)
    whole = np.asarray(native.matmul(jnp.asarray(x), weights))
    assert test_matmul.error(whole, x, np.asarray(weights, np.float32)) < test_matmul.TOLERANCE
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 14, 40):
        part = native.matmul(jnp.asarray(x[FEW - rows :]), weights)
        np.testing.assert_array_equal(np.asarray(part), whole[FEW - rows :])


@pytest.mark.parametrize("size", [9, 83])
def test_a_row_of_a_larger_product_is_the_same_in_any_batch(size: int) -> None:
    x, w = test_matmul.numbers(200, 45, size)
    whole = np.asarray(native.matmul(jnp.asarray(x), jnp.asarray(w)))
    assert test_matmul.error(whole, x, w) < test_matmul.TOLERANCE
    for rows in (65, 78, 131):
        part = native.matmul(jnp.asarray(x[:rows]), jnp.asarray(w))
        np.testing.assert_array_equal(np.asarray(part), whole[:rows])


@pytest.mark.parametrize("name", ["decode long beside short", "mixed"])
def test_attention_of_a_row_is_the_same_in_any_order(name: str) -> None:
    contract.test_equals_dense_attention("native", name)
    test_attention.test_order_and_padding_change_no_bit(name)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_attention_is_the_same_however_cut(window: int | None) -> None:
    test_attention.test_cuts_change_no_bit(window)


def test_attention_of_shared_blocks_is_the_same() -> None:
    test_attention.test_sharing_blocks_changes_no_bit(2)


def test_what_is_computed_row_by_row() -> None:
    test_rowwise.test_a_row_is_the_same_to_the_bit_in_any_batch()
    test_rowwise.test_swiglu_of_the_largest_numbers()
    x = test_rowwise.numbers(3, 258, spread=9).astype(np.float64)
    given = jnp.asarray(x, jnp.float32)
    root = np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        native.rms_norm(given, given[0], eps=1e-5), x / root * x[0], rtol=1e-5
    )
    a, b = x[:, :129], x[:, 129:]
    np.testing.assert_allclose(
        native.swiglu(given), a / (1 + np.exp(-a)) * b, rtol=3e-6, atol=1e-30
    )
    index, log_sum = native.argmax_logsumexp(given)
    np.testing.assert_array_equal(index, x.argmax(1))
    np.testing.assert_allclose(log_sum, np.log(np.exp(x).sum(1)), rtol=2e-6)
