"""What all attention functions do with their arguments before they call a kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import local_target
from pallas_kernels._tiles import Spec, power_of_two
from pallas_kernels.config import Kind, Tuning, choose
from pallas_kernels.write import KVPool

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
QUERY_DTYPES = ("float32", "bfloat16", "float16")
MOST_ELEMENTS = 2**31 - 1
"""Most numbers of one pool array: kernels count them with 32 bits."""


class FlatPool(NamedTuple):
    """A layer's pool as kernels take it: a row for each token and KV head."""

    k: Array  # [P * S * K, H]; float8 as uint8
    v: Array  # [P * S * K, H]
    scales: tuple[Array, ...]  # () or (K's, V's), each float32 [P * S * K]

    def arrays(self) -> tuple[Array, ...]:
        return (self.k, self.v, *self.scales)


class Scoring(NamedTuple):
    """How the product of a query and a key becomes a score; static."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def check(
    q: Array, pool: KVPool, block_tables: Array, lengths: tuple[Array, ...], scoring: Scoring
) -> None:
    """Raises ValueError for shapes and dtypes that do not fit together."""
    if q.ndim != 3 or pool.k.ndim != 4 or pool.k.shape != pool.v.shape:
        raise ValueError(
            f"got q {q.shape}, pools {pool.k.shape} and {pool.v.shape}, wanted q [B or T, N, H] "
            "and two pools [P, S, K, H]; reshape them"
        )
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = pool.k.shape[2]
    if head_dim != pool.k.shape[3] or num_heads % num_kv_heads:
        raise ValueError(
            f"got {num_heads} query heads of {head_dim} for {num_kv_heads} KV heads of "
            f"{pool.k.shape[3]}, wanted the same size and a multiple; check the pool's axes"
        )
    if q.dtype.name not in QUERY_DTYPES:
        raise ValueError(f"got queries of {q.dtype}, wanted one of {QUERY_DTYPES}; cast them")
    _check_storage(pool)
    integers = (block_tables, *lengths)
    if block_tables.ndim != 2 or any(array.dtype != jnp.int32 for array in integers):
        raise ValueError(
            f"got tables {block_tables.shape} and integers of "
            f"{[array.dtype.name for array in integers]}, wanted tables [B, M], all int32; cast"
        )
    window = scoring.sliding_window
    if window is not None and window < 1:
        raise ValueError(f"got sliding_window={window}, wanted at least 1, or None")


def choose_for(kind: Kind, q: Array, pool: KVPool) -> Tuning:
    """The tuning for these arrays on this process's card."""
    return choose(
        kind,
        dtype=q.dtype.name,
        kv_dtype=pool.k.dtype.name,
        head_dim=q.shape[2],
        group=q.shape[1] // pool.k.shape[2],
        target=local_target(),
    )


def flatten(pool: KVPool) -> FlatPool:
    """The pool as the kernels see it; nothing is copied."""
    k, v = (array.reshape(-1, array.shape[-1]) for array in (pool.k, pool.v))
    if k.dtype == FLOAT8:
        k, v = (lax.bitcast_convert_type(array, jnp.uint8) for array in (k, v))
    both = (pool.k_scales, pool.v_scales)
    return FlatPool(k, v, tuple(array.reshape(-1) for array in both if array is not None))


def make_spec(
    q: Array, pool: KVPool, block_tables: Array, scoring: Scoring, tuning: Tuning, *, most_rows: int
) -> Spec:
    """What the kernel of a call is compiled for.

    `most_rows`: the most rows, each one query of one head, that a tile of this call could fill; a
    tile that was tuned larger is made smaller.
    """
    num_heads, head_dim = q.shape[1:]
    _, block_size, num_kv_heads, _ = pool.k.shape
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
        scale=scoring.scale,
        sliding_window=scoring.sliding_window,
        soft_cap=scoring.soft_cap,
        is_float8=pool.k.dtype == FLOAT8,
    )


def _check_storage(pool: KVPool) -> None:
    """Raises ValueError for a pool of a wrong dtype, scales or size."""
    dtype = pool.k.dtype
    is_quantised = not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1
    if is_quantised and dtype not in (jnp.int8, FLOAT8):
        raise ValueError(f"got a pool of {dtype}, wanted float, int8 or {FLOAT8}; store so")
    wanted = pool.k.shape[:3] if is_quantised else None
    for scales in (pool.k_scales, pool.v_scales):
        got = None if scales is None else scales.shape
        if got != wanted:
            raise ValueError(
                f"got scales {got} for a pool of {dtype}, wanted {wanted}; pass k_scales "
                "and v_scales with int8 and float8 pools, and with those only"
            )
    if pool.k.size > MOST_ELEMENTS:
        raise ValueError(
            f"got a pool of {pool.k.size} elements, wanted at most {MOST_ELEMENTS} a layer; use "
            "fewer blocks, or shard the KV heads"
        )
