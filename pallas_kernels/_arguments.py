"""Checks the arguments that all attention functions share and lays the pool out for a kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._tiles import Spec, power_of_two
from pallas_kernels.config import Tuning

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
QUERY_DTYPES = ("float32", "bfloat16", "float16")
MOST_ELEMENTS = 2**31 - 1
"""Of one pool array: kernels count with 32 bits."""


class Pools(NamedTuple):
    """A layer's pool as rows of one token and KV head each."""

    k: Array  # [P * S * K, H]; float8 as uint8
    v: Array
    scales: tuple[Array, ...]  # float32 [P * S * K], K's and V's; or none

    def arrays(self) -> tuple[Array, ...]:
        return (self.k, self.v, *self.scales)


def check(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    block_tables: Array,
    lengths: tuple[Array, ...],
    sliding_window: int | None,
) -> None:
    """ValueError for shapes and dtypes that do not fit together."""
    if q.ndim != 3 or k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"got q {q.shape}, pools {k_pool.shape} and {v_pool.shape}, wanted q [B or T, N, H] "
            "and two pools [P, S, K, H]; reshape them"
        )
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[2]
    if head_dim != k_pool.shape[3] or num_heads % num_kv_heads:
        raise ValueError(
            f"got {num_heads} query heads of {head_dim} for {num_kv_heads} KV heads of "
            f"{k_pool.shape[3]}, wanted the same size and a multiple; check the pool's axes"
        )
    if q.dtype.name not in QUERY_DTYPES:
        raise ValueError(f"got queries of {q.dtype}, wanted one of {QUERY_DTYPES}; cast them")
    is_quantised = not jnp.issubdtype(k_pool.dtype, jnp.floating) or k_pool.dtype.itemsize == 1
    if is_quantised and k_pool.dtype not in (jnp.int8, FLOAT8):
        raise ValueError(f"got a pool of {k_pool.dtype}, wanted float, int8 or {FLOAT8}; store so")
    for scales in (k_scales, v_scales):
        wanted = k_pool.shape[:3] if is_quantised else None
        if (None if scales is None else scales.shape) != wanted:
            got = None if scales is None else scales.shape
            raise ValueError(
                f"got scales {got} for a pool of {k_pool.dtype}, wanted {wanted}; pass k_scales "
                "and v_scales with int8 and float8 pools, and with those only"
            )
    if k_pool.size > MOST_ELEMENTS:
        raise ValueError(
            f"got a pool of {k_pool.size} elements, wanted at most {MOST_ELEMENTS} a layer; use "
            "fewer blocks, or shard the KV heads"
        )
    integers = (block_tables, *lengths)
    if block_tables.ndim != 2 or any(array.dtype != jnp.int32 for array in integers):
        raise ValueError(
            f"got tables {block_tables.shape} and integers of "
            f"{[array.dtype.name for array in integers]}, wanted tables [B, M], all int32; cast"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"got sliding_window={sliding_window}, wanted at least 1, or None")


def flatten(k_pool: Array, v_pool: Array, k_scales: Array | None, v_scales: Array | None) -> Pools:
    """The pool as the kernels see it; nothing is copied."""
    k, v = (pool.reshape(-1, pool.shape[-1]) for pool in (k_pool, v_pool))
    if k.dtype == FLOAT8:
        k, v = (lax.bitcast_convert_type(pool, jnp.uint8) for pool in (k, v))
    scales = tuple(array.reshape(-1) for array in (k_scales, v_scales) if array is not None)
    return Pools(k, v, scales)


def make_spec(
    q: Array,
    k_pool: Array,
    block_tables: Array,
    tuning: Tuning,
    *,
    most_rows: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Spec:
    """`most_rows`: queries times heads that one tile could use; smaller tiles than tuned then."""
    num_heads, head_dim = q.shape[1:]
    _, block_size, num_kv_heads, _ = k_pool.shape
    query_rows = min(power_of_two(tuning.query_rows), power_of_two(most_rows))
    return Spec(
        block_size=block_size,
        table_width=block_tables.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_k=power_of_two(tuning.block_k),
        query_rows=query_rows,
        tile_heads=min(num_heads // num_kv_heads, query_rows),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        is_float8=k_pool.dtype == FLOAT8,
    )
