"""Writes K and V of one step into the pool, and turns numbers into 8 bits and back.

The write is XLA's own scatter: as all slots differ it needs no atomics, and with a donated pool it
happens in place. Quantised pools keep one float32 scale a token and KV head, so a token is
written without touching its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import own_constants

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number of each 8-bit type."""
OUTSIDE = 2**31 - 1
"""A slot outside of any pool."""


class KVPool(NamedTuple):
    """One layer's pool. The scales go with int8 and float8 pools only."""

    k: Array  # [P, S, K, H]
    v: Array  # [P, S, K, H]
    k_scales: Array | None = None  # float32 [P, S, K]
    v_scales: Array | None = None  # float32 [P, S, K]


@own_constants()
def write_kv(
    k_pool: Array,
    v_pool: Array,
    k: Array,
    v: Array,
    slots: Array,
    *,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> KVPool:
    """The pool with each token's K and V [T, K, H] at its slot, block * S + offset.

    Slots int32 [T] must differ from each other; those >= P * S are dropped, so padding takes
    distinct ones from there on. With scales the pool's dtype is int8 or float8_e4m3fn and the
    tokens are quantised on the way.
    """
    if (k_scales is None) != (v_scales is None):
        raise ValueError("got scales for one of K and V only, wanted both or none; pass both")
    if k_scales is None or v_scales is None:
        return KVPool(_scatter(k_pool, k, slots), _scatter(v_pool, v, slots))
    k, new_k_scales = quantize(k, k_pool.dtype)
    v, new_v_scales = quantize(v, v_pool.dtype)
    return KVPool(
        _scatter(k_pool, k, slots),
        _scatter(v_pool, v, slots),
        _scatter(k_scales, new_k_scales, slots),
        _scatter(v_scales, new_v_scales, slots),
    )


@own_constants()
def quantize(x: Array, dtype: jnp.dtype | str) -> tuple[Array, Array]:
    """(x in 8 bits [..., H], float32 scales [...]), one scale a head: their product is about x.

    dtype is int8 or float8_e4m3fn; ValueError for any other.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        raise ValueError(f"got dtype {name}, wanted one of {tuple(LARGEST)}; choose one")
    exact = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(exact), axis=-1) / LARGEST[name]
    scaled = exact / jnp.where(scales > 0, scales, 1)[..., None]
    if name == "int8":
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -LARGEST[name], LARGEST[name]).astype(dtype), scales


@own_constants()
def dequantize(values: Array, scales: Array, dtype: jnp.dtype | str = "float32") -> Array:
    """values [..., H] times scales [...]: about what `quantize` was given, as `dtype`."""
    return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)


def _scatter(pool: Array, tokens: Array, slots: Array) -> Array:
    """pool [P, S, ...] with tokens [T, ...] at their slots."""
    flat = pool.reshape(-1, *pool.shape[2:])
    tokens = tokens.astype(pool.dtype)
    if slots.shape[0] == 1:
        # XLA turns a scatter of one row into a slice update, which copies the whole pool.
        tokens = jnp.concatenate([tokens, tokens])
        slots = jnp.append(slots, jnp.int32(OUTSIDE))
    flat = flat.at[slots].set(tokens, mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)
