"""Adapters of rows: what they add, to which rows, and that layers alike are traced once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import jaxpage as jp
from jaxpage.backends import PLAIN
from jaxpage.device.ops import Ops
from jaxpage.device.types import LayerKV
from tests.models.toys import hidden_of, toy_config

CONFIG = toy_config()
MODEL, PARAMS = jp.build_model(CONFIG), jp.init_params(CONFIG, 1)
SIZE = 4
QKV_OUT = CONFIG.num_kv_heads * (CONFIG.group_size + 2) * CONFIG.head_dim


def adapter(seed: int, out: int, size: int, dtype: Any = jnp.float32) -> tuple[Array, Array]:
    """Adapter 0, zeros, and two random ones, of rank 2."""
    down, up = (
        jax.random.normal(jax.random.key(seed + place), shape).at[0].set(0).astype(dtype)
        for place, shape in enumerate(((3, 2, size), (3, out, 2)))
    )
    return down, up


def of_model(num_layers: int = CONFIG.num_layers) -> dict[str, Any]:
    return {
        f"layers_{i}": {"qkv": adapter(i, QKV_OUT, 32), "down": adapter(9 + i, 32, 48)}
        for i in range(num_layers)
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_gets_what_its_adapter_adds(dtype: str) -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    step = jp.prefill_input(
        rows, [[1], [2], [3]], SIZE, adapters=[2, 0, 1], num_tokens=8, num_rows=4
    )
    down, up = adapter(3, 5, 32)
    ops = Ops.of(step, PLAIN, {"layers_0": {"out": (down, up)}}).layer("layers_0")
    x = jax.random.normal(jax.random.key(7), (8, 32)).astype(dtype)
    w = jax.random.normal(jax.random.key(8), (5, 32)).astype(dtype)
    plain = PLAIN.linear(x, w)
    got = ops.linear(x, w, name="out")
    assert got.dtype == plain.dtype
    np.testing.assert_array_equal(got[3], plain[3])
    np.testing.assert_array_equal(ops.linear(x, w, name="other"), plain)
    wide = np.asarray(x, np.float64)
    for tokens, own in ((slice(0, 3), 2), (slice(4, 6), 1)):
        added = wide[tokens] @ np.asarray(down[own]).T @ np.asarray(up[own]).T
        want = np.asarray(plain, np.float64)[tokens] + added
        np.testing.assert_allclose(
            np.asarray(got, np.float64)[tokens], want, rtol=2e-2 if dtype == "bfloat16" else 1e-4,
            atol=0.3 if dtype == "bfloat16" else 1e-4,
        )  # fmt: skip
        assert np.abs(added).max() > 3


@pytest.mark.slow
def test_rows_without_one_keep_their_bits_and_padding_hurts_nothing() -> None:
    run = jax.jit(lambda step, adapters: jp.forward(
        MODEL, PARAMS, jp.init_cache(CONFIG, 4, SIZE), step, adapters=adapters
    )[1])  # fmt: skip
    rows, tables = [[1, 2, 3], [4, 5]], [[1], [2]]
    plain = run(jp.prefill_input(rows, tables, SIZE), None)
    none = run(jp.prefill_input(rows, tables, SIZE), of_model())
    np.testing.assert_array_equal(none, plain)
    got = run(jp.prefill_input(rows, tables, SIZE, adapters=[0, 1]), of_model())
    np.testing.assert_array_equal(got[0], plain[0])
    assert np.abs(np.asarray(got[1] - plain[1])).max() > 1e-3
    padded = jp.prefill_input(rows, tables, SIZE, adapters=[0, 1], num_rows=3, num_tokens=9)
    np.testing.assert_allclose(run(padded, of_model())[:2], got, atol=1e-5)
    one = jp.decode_input([7, 7], [0, 0], tables, SIZE, adapters=[1, 2], num_rows=4)
    other = jp.decode_input([7, 7], [0, 0], tables, SIZE, adapters=[2, 1], num_rows=4)
    a, b = run(one, of_model()), run(other, of_model())
    np.testing.assert_allclose(a[:2], b[1::-1], atol=1e-5)
    assert np.abs(np.asarray(a[0] - a[1])).max() > 1e-3


@pytest.mark.slow
def test_layers_of_one_spec_are_traced_once_whatever_their_adapters() -> None:
    calls = []

    def counting(q: Array, k: Array, v: Array, layer_kv: LayerKV, *_: Any) -> tuple[Array, Any]:
        calls.append(q.shape)
        return q, layer_kv

    config = toy_config(num_layers=4)
    model, params = jp.build_model(config), jp.init_params(config)
    step = jp.prefill_input([[1, 2]], [[1]], SIZE, adapters=[1])
    hidden_of(model, params, step, counting, adapters=of_model(4))
    assert len(calls) == 1
    uneven = of_model(3)  # the last layer has none
    hidden_of(model, params, step, counting, adapters=uneven)
    assert len(calls) == 2
