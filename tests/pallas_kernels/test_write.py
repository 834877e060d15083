"""Writing K and V: against the oracle, in place, without atomics, and in 8 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import KVPool, reference

P, S, K, H = 5, 4, 2, 8
SLOTS = {
    "some": [7, 2, 19, P * S, P * S + 1],
    "one": [6],
    "all dropped": [P * S + 5, P * S, 2**31 - 2],
}


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_equals_a_write_token_by_token(dtype: str, slots: list[int]) -> None:
    pool = jnp.full((P, S, K, H), 3, dtype)
    k, v = numbers(2, len(slots), K, H)
    scales = {}
    if dtype in ("int8", "float8_e4m3fn"):
        scales = {name: jnp.full((P, S, K), 0.5) for name in ("k_scales", "v_scales")}
    index = jnp.asarray(slots, jnp.int32)
    got = jax.jit(pallas_kernels.write_kv)(pool, pool, k, v, index, **scales)
    want = reference.write_kv(pool, pool, k, v, index, **scales)
    assert (got.k_scales is None) == (not scales)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def test_the_write_is_in_place() -> None:
    """With the pool donated nothing of its size is allocated, for one token too."""
    pool = jax.ShapeDtypeStruct((2**14, S, K, H), jnp.float32)
    for tokens in (1, 6):
        new = jax.ShapeDtypeStruct((tokens, K, H), jnp.float32)
        slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        write = jax.jit(pallas_kernels.write_kv, donate_argnums=(0, 1))
        memory = write.lower(pool, pool, new, new, slots).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == 2 * pool.size * 4
        assert memory.temp_size_in_bytes < 0.02 * pool.size * 4


def test_the_scatter_is_told_that_slots_differ() -> None:
    """What keeps atomics out of a GPU's program."""
    pool, new = numbers(P, S, K, H), numbers(3, K, H)
    index = jnp.asarray([1, 2, 3], jnp.int32)
    text = jax.jit(pallas_kernels.write_kv).lower(pool, pool, new, new, index).as_text()
    scatters = text.count('= "stablehlo.scatter"(')
    assert scatters == text.count("unique_indices = true") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)])
def test_quantising_keeps_what_eight_bits_can(dtype: str, most: float) -> None:
    x = numbers(3, 5, H) * jnp.asarray([1e-3, 1, 1e4])[:, None, None]
    values, scales = pallas_kernels.quantize(x, dtype)
    assert values.dtype == jnp.dtype(dtype)
    error = jnp.abs(pallas_kernels.dequantize(values, scales) - x).max(-1)
    assert (error <= 1.001 * most * jnp.abs(x).max(-1)).all()


def test_zeros_are_stored_as_zeros() -> None:
    values, scales = pallas_kernels.quantize(jnp.zeros((2, H)), "int8")
    assert not pallas_kernels.dequantize(values, scales).any()


def test_what_does_not_fit_is_refused() -> None:
    pool, new = numbers(P, S, K, H), numbers(1, K, H)
    with pytest.raises(ValueError, match="int8"):
        pallas_kernels.quantize(new, "int4")
    with pytest.raises(ValueError, match="both"):
        pallas_kernels.write_kv(
            pool, pool, new, new, jnp.zeros(1, jnp.int32), k_scales=jnp.ones((P, S, K))
        )
    assert isinstance(pallas_kernels.write_kv(pool, pool, new, new, jnp.asarray([0])), KVPool)
