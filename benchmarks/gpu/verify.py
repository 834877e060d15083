"""The part that verifies: every kernel against its oracle, over poisoned pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

import pallas_kernels as kernels
from benchmarks.gpu.kernels import BLOCK_SIZE, Heads, Sizes
from pallas_kernels import reference
from pallas_kernels.write import KVPool, quantize

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of a row over the row's largest value. Of 8-bit pools too, by the queries' dtype:
the oracle reads the same 8 bits."""


def verify_kernels(sizes: Sizes) -> list[dict[str, Any]]:
    """Every kernel against its oracle, one dict a case: case, error, tolerance, ok."""
    settings = [(heads, dtype, None) for heads in sizes.verify_heads for dtype in sizes.dtypes]
    settings += [(sizes.verify_heads[0], "bfloat16", kv_dtype) for kv_dtype in sizes.kv_dtypes]
    rows = []
    for heads, dtype, kv_dtype in settings:
        name = f"{heads[0]}/{heads[1]} d{heads[2]} {dtype}"
        name += "" if kv_dtype is None else f" over {kv_dtype}"
        cases = [
            (kind, _row_error(got, wanted), TOLERANCES[dtype])
            for kind, got, wanted in _attention_cases(heads, dtype, kv_dtype, sizes.lengths)
        ]
        cases.append(("write", _write_error(heads, dtype, kv_dtype), 0.0))
        rows += [
            {
                "case": f"{kind} {name}",
                "error": error,
                "tolerance": tolerance,
                "ok": error <= tolerance,
            }
            for kind, error, tolerance in cases
        ]
    return rows


def _attention_cases(
    heads: Heads, dtype: str, kv_dtype: str | None, lengths: tuple[int, ...]
) -> Iterator[tuple[str, Array, Array]]:
    """(name, kernel's result, oracle's result in float32) over a poisoned pool."""
    num_heads, num_kv_heads, head_dim = heads
    num_rows = len(lengths)
    pool, tables = _poisoned_pool(num_kv_heads, head_dim, dtype, lengths)
    scales = {}
    if kv_dtype is not None:  # NaN becomes a NaN scale
        (k, k_scales), (v, v_scales) = (quantize(array, kv_dtype) for array in pool)
        pool, scales = (k, v), {"k_scales": k_scales, "v_scales": v_scales}
    q = random.normal(random.key(1), (num_rows, num_heads, head_dim)).astype(dtype)
    lens = jnp.array(lengths, jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32)
    groups = jnp.array([[num_rows - 2, num_rows - 1]], jnp.int32)
    shared = tables.at[-1, 0].set(tables[-2, 0])
    prefix = jnp.array([BLOCK_SIZE], jnp.int32)
    scale = head_dim**-0.5
    wide_q = q.astype(jnp.float32)
    wide = pool if scales else tuple(array.astype(jnp.float32) for array in pool)
    for name, function, own, rest in (
        ("decode", kernels.paged_decode_attention, tables, ()),
        ("prefill", kernels.paged_prefill_attention, tables, (starts,)),
        ("shared prefix", kernels.shared_prefix_decode_attention, shared, (groups, prefix)),
    ):
        got = function(q, *pool, own, lens, *rest, scale=scale, **scales)
        wanted = _oracle(function.__name__, scale)(wide_q, *wide, own, lens, *rest, **scales)
        assert isinstance(got, Array), type(got)  # no log-sum-exp was asked for
        yield name, got, wanted


@cache
def _oracle(name: str, scale: float) -> Callable[..., Array]:
    """Compiled as one program, shared by all dtypes: the budget is minutes."""
    return jax.jit(partial(getattr(reference, name), scale=scale))


def _write_error(heads: Heads, dtype: str, kv_dtype: str | None) -> float:
    """0 where the written pool equals the oracle's, bit for bit; else infinite."""
    _, num_kv_heads, head_dim = heads
    shape = (3, BLOCK_SIZE, num_kv_heads, head_dim)
    pools = [jnp.full(shape, 7, kv_dtype or dtype) for _ in range(2)]
    scales = {}
    if kv_dtype is not None:
        scales = {name: jnp.ones(shape[:3], jnp.float32) for name in ("k_scales", "v_scales")}
    slots = jnp.array([17, 3, 40, 48, 16], jnp.int32)  # 48 lies behind the pool: dropped
    keys = random.split(random.key(2))
    k, v = (random.normal(key, (5, num_kv_heads, head_dim)).astype(dtype) for key in keys)
    got, wanted = (
        module.write_kv(*pools, k, v, slots, **scales) for module in (kernels, reference)
    )
    return 0.0 if _are_equal(got, wanted) else float("inf")


def _are_equal(got: KVPool, wanted: KVPool) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return all(bool((a.astype(jnp.float32) == b.astype(jnp.float32)).all()) for a, b in pairs)


def _poisoned_pool(
    num_kv_heads: int, head_dim: int, dtype: str, lengths: tuple[int, ...]
) -> tuple[tuple[Array, Array], Array]:
    """((K, V), block tables) of rows of these lengths; NaN in every slot that no row may read."""
    num_rows, width = len(lengths), -(-max(lengths) // BLOCK_SIZE)
    keys = random.split(random.key(0), 3)
    shape = (num_rows * width + 1, BLOCK_SIZE, num_kv_heads, head_dim)
    tables = 1 + random.permutation(keys[0], num_rows * width).reshape(num_rows, width)
    tables = tables.astype(jnp.int32)
    live = jnp.arange(width * BLOCK_SIZE)[None, :] < jnp.array(lengths, jnp.int32)[:, None]
    is_live = jnp.zeros(shape[:2], bool).at[tables].set(live.reshape(*tables.shape, BLOCK_SIZE))
    k, v = (
        jnp.where(is_live[..., None, None], random.normal(key, shape), jnp.nan).astype(dtype)
        for key in keys[1:]
    )
    return (k, v), tables


def _row_error(got: Array, wanted: Array) -> float:
    difference = jnp.abs(got.astype(jnp.float32) - wanted).max(-1)
    largest = jnp.abs(wanted).max(-1)
    # A row without context is exactly 0, so any difference there is an infinite error.
    relative = jnp.where(largest > 0, difference / jnp.where(largest > 0, largest, 1), 0)
    empty = jnp.where((largest == 0) & (difference > 0), jnp.inf, 0)
    worst = float(jnp.maximum(relative, empty).max())
    return worst if worst == worst else float("inf")
