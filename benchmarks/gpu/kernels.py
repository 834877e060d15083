"""What is timed with JAX alone: copies and matmuls, then each kernel as a share of those."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

import pallas_kernels as kernels
from benchmarks.gpu.peers import decode_peers, prefill_peers
from benchmarks.gpu.timing import seconds_of

BLOCK_SIZE = 16
Heads = tuple[int, int, int]
"""Query heads, KV heads, head dim."""
HEADS: dict[str, Heads] = {"7b": (32, 32, 128), "13b": (40, 40, 128), "8b": (32, 8, 128)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run."""

    is_quick: bool = False
    verify_heads: tuple[Heads, ...] = ((32, 8, 128), (9, 3, 64), (32, 32, 80))
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    kv_dtypes: tuple[str, ...] = ("int8", "float8_e4m3fn")
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 300, 1025)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    models: tuple[str, ...] = ("7b", "8b", "13b")
    peer_batches: tuple[int, ...] = (1, 32)
    peer_contexts: tuple[int, ...] = (2048, 8192)
    """Decode cases that peers run beside: each is a program more to compile."""
    new_tokens: int = 16
    """Of a row, by Transformers' generate."""
    copy_bytes: int = 2**30
    matmul_size: int = 8192
    min_seconds: float = 0.02

    @classmethod
    def quick(cls) -> Sizes:
        """Small enough for interpret mode on two cores."""
        return cls(
            is_quick=True,
            verify_heads=((4, 2, 16),),
            dtypes=("bfloat16",),
            lengths=(0, 1, 17, 40),
            batches=(1,),
            contexts=(32,),
            prompts=(32,),
            models=("8b",),
            peer_batches=(1,),
            peer_contexts=(32,),
            new_tokens=3,
            copy_bytes=2**20,
            matmul_size=128,
            min_seconds=0.0,
        )


def device_rates(sizes: Sizes) -> dict[str, float]:
    """Bytes a second of a copy, operations a second of a bfloat16 matmul, as measured here."""
    x = jnp.ones(sizes.copy_bytes // 4, jnp.float32)
    copy_s = seconds_of(jax.jit(lambda x: x + 1), x, min_seconds=sizes.min_seconds)
    size = sizes.matmul_size
    a = jnp.ones((size, size), jnp.bfloat16)
    matmul_s = seconds_of(jax.jit(jnp.matmul), a, a, min_seconds=sizes.min_seconds)
    return {"copy": 2 * x.nbytes / copy_s, "matmul": 2 * size**3 / matmul_s}


def decode_rows(sizes: Sizes, copy_rate: float, deadline: float) -> list[dict[str, Any]]:
    """Decode attention of one layer, as a share of the copy's bandwidth, peers beside it."""
    rows = []
    for model, batch, context in itertools.product(sizes.models, sizes.batches, sizes.contexts):
        case = {"case": f"decode {model}, {batch} x {context}"}
        num_heads, num_kv_heads, head_dim = HEADS[model]
        kv_bytes = 2 * batch * context * num_kv_heads * head_dim * 2
        has_peers = batch in sizes.peer_batches and context in sizes.peer_contexts
        # The peers' dense K and V once more, and what gathers them.
        if reason := _why_not(kv_bytes * (3 if has_peers else 1), deadline):
            rows.append(case | {"skipped": reason})
            continue
        pools, tables = _filled_pools(batch, context, num_kv_heads, head_dim)
        q = random.normal(random.key(3), (batch, num_heads, head_dim), jnp.bfloat16)
        lens = jnp.full((batch,), context, jnp.int32)
        call = jax.jit(partial(kernels.paged_decode_attention, scale=head_dim**-0.5))
        taken = seconds_of(call, q, *pools, tables, lens, min_seconds=sizes.min_seconds)
        row = case | {"us": taken * 1e6, "of": "copy", "bytes": kv_bytes}
        row["share"] = kv_bytes / taken / copy_rate
        if has_peers:
            peers = decode_peers(q, pools, tables, lens, min_seconds=sizes.min_seconds)
            row["peers"] = with_shares(peers, row)
        rows.append(row)
    return rows


def prefill_rows(sizes: Sizes, matmul_rate: float, deadline: float) -> list[dict[str, Any]]:
    """Prefill attention of one layer and prompt, as a share of the matmul's rate."""
    rows = []
    for model, prompt in itertools.product(sizes.models, sizes.prompts):
        case = {"case": f"prefill {model}, {prompt}"}
        num_heads, num_kv_heads, head_dim = HEADS[model]
        if reason := _why_not(8 * prompt * num_kv_heads * head_dim, deadline):
            rows.append(case | {"skipped": reason})
            continue
        pools, tables = _filled_pools(1, prompt, num_kv_heads, head_dim)
        q = random.normal(random.key(3), (prompt, num_heads, head_dim), jnp.bfloat16)
        lens, starts = jnp.array([prompt], jnp.int32), jnp.array([0, prompt], jnp.int32)
        call = jax.jit(partial(kernels.paged_prefill_attention, scale=head_dim**-0.5))
        taken = seconds_of(call, q, *pools, tables, lens, starts, min_seconds=sizes.min_seconds)
        row = case | {"us": taken * 1e6, "of": "matmul"}
        row["share"] = 2 * prompt**2 * num_heads * head_dim / taken / matmul_rate
        k, v = (pool[tables[0]].reshape(prompt, num_kv_heads, head_dim) for pool in pools)
        peers = prefill_peers(q, k, v, min_seconds=sizes.min_seconds)
        row["peers"] = with_shares(peers, row)
        rows.append(row)
    return rows


def free_bytes() -> int:
    """What JAX may still allocate on its first device; a great many where it cannot tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 2**62) - stats.get("bytes_in_use", 0)


def with_shares(peers: dict[str, dict[str, Any]], row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The peers, each time also as the share that `row` is given as."""
    for peer in peers.values():
        if "us" in peer:
            peer["share"] = row["share"] * row["us"] / peer["us"]
    return peers


def _filled_pools(
    rows: int, tokens: int, kv_heads: int, head_dim: int
) -> tuple[tuple[Array, Array], Array]:
    """((K, V), block tables) without a null block: cuDNN wants each block in a table.

    Two arrays: with one for both, V would be read from cache.
    """
    width = tokens // BLOCK_SIZE
    pools = [
        jnp.tile(random.normal(key, (1, BLOCK_SIZE, kv_heads, head_dim), jnp.bfloat16), repeats)
        for key in random.split(random.key(1))
        for repeats in [(rows * width, 1, 1, 1)]
    ]
    tables = random.permutation(random.key(2), rows * width).reshape(rows, width)
    return (pools[0], pools[1]), tables.astype(jnp.int32)


def _why_not(num_bytes: int, deadline: float) -> str | None:
    if time.perf_counter() > deadline:
        return "out of time"
    return "more than this card's memory" if num_bytes > 0.9 * free_bytes() else None
