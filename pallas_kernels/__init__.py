"""Attention over a paged KV cache on NVIDIA GPUs, for JAX; interpreted where there is none.

A pool is two arrays [blocks, block size, KV heads, head dim]; a row's tokens lie in the blocks that
its block table names. Nothing but JAX is needed:

    import jax.numpy as jnp
    from jax import random
    from pallas_kernels import paged_decode_attention, write_kv

    pool = jnp.zeros((64, 16, 8, 128), jnp.bfloat16)  # 64 blocks of 16 tokens, 8 KV heads
    tables = jnp.array([[3, 7], [5, 0]], jnp.int32)  # the blocks of two sequences
    lens = jnp.array([17, 4], jnp.int32)
    q = random.normal(random.key(0), (2, 32, 128), jnp.bfloat16)
    k, v = random.normal(random.key(1), (2, 2, 8, 128), jnp.bfloat16)
    kv = write_kv(pool, pool, k, v, slots=jnp.array([7 * 16, 5 * 16 + 3], jnp.int32))
    out = paged_decode_attention(q, kv.k, kv.v, tables, lens, scale=128**-0.5)  # [2, 32, 128]

`reference` holds each function again in plain jnp. The names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.decode import paged_decode_attention
    from pallas_kernels.merge import merge_partials
    from pallas_kernels.prefill import paged_prefill_attention
    from pallas_kernels.shared_prefix import shared_prefix_decode_attention
    from pallas_kernels.write import KVPool, dequantize, quantize, write_kv

__all__ = [
    "KVPool",
    "dequantize",
    "merge_partials",
    "paged_decode_attention",
    "paged_prefill_attention",
    "quantize",
    "shared_prefix_decode_attention",
    "write_kv",
]

_HOMES = {
    "KVPool": "write",
    "dequantize": "write",
    "merge_partials": "merge",
    "paged_decode_attention": "decode",
    "paged_prefill_attention": "prefill",
    "quantize": "write",
    "shared_prefix_decode_attention": "shared_prefix",
    "write_kv": "write",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pallas_kernels.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
