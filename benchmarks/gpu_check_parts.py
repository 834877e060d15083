"""What gpu_check runs with JAX alone: kernels against their oracles, then their times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

import pallas_kernels as kernels
from pallas_kernels import reference

BLOCK_SIZE = 16
TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error of a row over the row's largest value."""
HEADS = {"7b": (32, 32, 128), "13b": (40, 40, 128), "8b": (32, 8, 128)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run."""

    is_quick: bool = False
    verify_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (9, 3, 64), (32, 32, 80))
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 300, 1025)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    models: tuple[str, ...] = ("7b", "8b", "13b")
    copy_bytes: int = 2**30
    matmul_size: int = 8192
    min_seconds: float = 0.02

    @classmethod
    def quick(cls) -> Sizes:
        """Small enough for interpret mode on two cores."""
        return cls(
            is_quick=True,
            verify_heads=((4, 2, 16),),
            dtypes=("float32", "bfloat16"),
            lengths=(0, 1, 17, 40),
            batches=(1,),
            contexts=(32,),
            prompts=(32,),
            models=("8b",),
            copy_bytes=2**20,
            matmul_size=128,
            min_seconds=0.0,
        )


def verify_kernels(sizes: Sizes) -> list[dict[str, Any]]:
    """Every kernel against its oracle, one dict a case: case, error, tolerance, ok."""
    rows = []
    for heads, dtype in itertools.product(sizes.verify_heads, sizes.dtypes):
        for name, got, wanted in _cases(heads, dtype, sizes.lengths):
            error = _row_error(got, wanted)
            rows.append(
                {
                    "case": f"{name} {heads[0]}/{heads[1]} d{heads[2]} {dtype}",
                    "error": error,
                    "tolerance": TOLERANCES[dtype],
                    "ok": error <= TOLERANCES[dtype],
                }
            )
    return rows


def device_rates(sizes: Sizes) -> dict[str, float]:
    """Bytes a second of a copy, operations a second of a bfloat16 matmul, as measured here."""
    x = jnp.ones(sizes.copy_bytes // 4, jnp.float32)
    copy_s = seconds_of(jax.jit(lambda x: x + 1), x, min_seconds=sizes.min_seconds)
    size = sizes.matmul_size
    a = jnp.ones((size, size), jnp.bfloat16)
    matmul_s = seconds_of(jax.jit(jnp.matmul), a, a, min_seconds=sizes.min_seconds)
    return {"copy": 2 * x.nbytes / copy_s, "matmul": 2 * size**3 / matmul_s}


def decode_rows(sizes: Sizes, copy_rate: float, deadline: float) -> list[dict[str, Any]]:
    """Decode attention of one layer, as a share of the copy's bandwidth."""
    rows = []
    for model, batch, context in itertools.product(sizes.models, sizes.batches, sizes.contexts):
        case = {"case": f"decode {model}, {batch} x {context}"}
        num_heads, num_kv_heads, head_dim = HEADS[model]
        kv_bytes = 2 * batch * context * num_kv_heads * head_dim * 2
        if reason := _why_not(kv_bytes, deadline):
            rows.append(case | {"skipped": reason})
            continue
        pool, tables = _filled_pool(batch, context, num_kv_heads, head_dim)
        q = jnp.ones((batch, num_heads, head_dim), jnp.bfloat16)
        lens = jnp.full((batch,), context, jnp.int32)
        call = jax.jit(partial(kernels.paged_decode_attention, scale=head_dim**-0.5))
        taken = seconds_of(call, q, pool, pool, tables, lens, min_seconds=sizes.min_seconds)
        share = kv_bytes / taken / copy_rate
        rows.append(case | {"us": taken * 1e6, "share": share, "of": "copy", "bytes": kv_bytes})
    return rows


def prefill_rows(sizes: Sizes, matmul_rate: float, deadline: float) -> list[dict[str, Any]]:
    """Prefill attention of one layer and prompt, as a share of the matmul's rate."""
    rows = []
    for model, prompt in itertools.product(sizes.models, sizes.prompts):
        case = {"case": f"prefill {model}, {prompt}"}
        num_heads, num_kv_heads, head_dim = HEADS[model]
        if reason := _why_not(4 * prompt * num_kv_heads * head_dim, deadline):
            rows.append(case | {"skipped": reason})
            continue
        pool, tables = _filled_pool(1, prompt, num_kv_heads, head_dim)
        q = jnp.ones((prompt, num_heads, head_dim), jnp.bfloat16)
        lens, starts = jnp.array([prompt], jnp.int32), jnp.array([0, prompt], jnp.int32)
        call = jax.jit(partial(kernels.paged_prefill_attention, scale=head_dim**-0.5))
        taken = seconds_of(call, q, pool, pool, tables, lens, starts, min_seconds=sizes.min_seconds)
        share = 2 * prompt**2 * num_heads * head_dim / taken / matmul_rate
        row = case | {"us": taken * 1e6, "share": share, "of": "matmul"}
        if jax.default_backend() == "gpu":
            row["cudnn_us"] = _dense_cudnn_s(prompt, HEADS[model], sizes.min_seconds) * 1e6
        rows.append(row)
    return rows


def seconds_of(call: Callable[..., Any], *arrays: Any, min_seconds: float) -> float:
    """Seconds a call, warm: calls are dispatched in a row until they fill `min_seconds`."""
    result = jax.block_until_ready(call(*arrays))
    times = 1
    while True:
        start = time.perf_counter()
        for _ in range(times):
            result = call(*arrays)
        jax.block_until_ready(result)
        taken = time.perf_counter() - start
        if taken >= min_seconds:
            return taken / times
        times = min(times * 4, 4096)


def _cases(
    heads: tuple[int, int, int], dtype: str, lengths: tuple[int, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """(name, kernel's result, oracle's result in float32) over a poisoned pool."""
    num_heads, num_kv_heads, head_dim = heads
    num_rows = len(lengths)
    k, v, tables = _poisoned_pool(num_kv_heads, head_dim, dtype, lengths)
    q = random.normal(random.key(1), (num_rows, num_heads, head_dim)).astype(dtype)
    lens = jnp.array(lengths, jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32)
    groups = jnp.array([[num_rows - 2, num_rows - 1]], jnp.int32)
    tables_shared = tables.at[-1, 0].set(tables[-2, 0])
    prefix = jnp.array([BLOCK_SIZE], jnp.int32)
    wide_q, wide_k, wide_v = (array.astype(jnp.float32) for array in (q, k, v))
    fixed = {"scale": head_dim**-0.5}
    yield (
        "decode",
        kernels.paged_decode_attention(q, k, v, tables, lens, **fixed),
        reference.paged_decode_attention(wide_q, wide_k, wide_v, tables, lens, **fixed),
    )
    yield (
        "prefill",
        kernels.paged_prefill_attention(q, k, v, tables, lens, starts, **fixed),
        reference.paged_prefill_attention(wide_q, wide_k, wide_v, tables, lens, starts, **fixed),
    )
    yield (
        "shared prefix",
        kernels.shared_prefix_decode_attention(
            q, k, v, tables_shared, lens, groups, prefix, **fixed
        ),
        reference.paged_decode_attention(wide_q, wide_k, wide_v, tables_shared, lens, **fixed),
    )


def _poisoned_pool(
    num_kv_heads: int, head_dim: int, dtype: str, lengths: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """(K, V, block tables) of rows of these lengths; NaN in every slot that no row may read."""
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
    return k, v, tables


def _row_error(got: Any, wanted: Any) -> float:
    difference = jnp.abs(got.astype(jnp.float32) - wanted).max(-1)
    largest = jnp.abs(wanted).max(-1)
    # A row without context is exactly 0, so any difference there is an infinite error.
    relative = jnp.where(largest > 0, difference / jnp.where(largest > 0, largest, 1), 0)
    empty = jnp.where((largest == 0) & (difference > 0), jnp.inf, 0)
    worst = float(jnp.maximum(relative, empty).max())
    return worst if worst == worst else float("inf")


def _filled_pool(rows: int, tokens: int, kv_heads: int, head_dim: int) -> tuple[Array, Array]:
    width = tokens // BLOCK_SIZE
    block = random.normal(random.key(1), (1, BLOCK_SIZE, kv_heads, head_dim), jnp.bfloat16)
    pool = jnp.tile(block, (rows * width + 1, 1, 1, 1))
    tables = 1 + random.permutation(random.key(2), rows * width)
    return pool, tables.reshape(rows, width).astype(jnp.int32)


def _why_not(num_bytes: int, deadline: float) -> str | None:
    if time.perf_counter() > deadline:
        return "out of time"
    stats = jax.devices()[0].memory_stats() or {}
    if 2 * num_bytes > stats.get("bytes_limit", 2**62) - stats.get("bytes_in_use", 0):
        return "more than this card's memory"
    return None


def _dense_cudnn_s(prompt: int, heads: tuple[int, int, int], min_seconds: float) -> float:
    num_heads, num_kv_heads, head_dim = heads
    q = jnp.ones((1, prompt, num_heads, head_dim), jnp.bfloat16)
    k = jnp.ones((1, prompt, num_kv_heads, head_dim), jnp.bfloat16)
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return seconds_of(jax.jit(attend), q, k, k, min_seconds=min_seconds)
