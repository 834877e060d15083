"""The least time a decode step can take here: bytes over bandwidth, FLOPs over the matmul rate."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage import ModelConfig
from jaxpage.device.kv_cache import block_bytes

CONTEXT_TOKENS = 256
"""In the cache for each row: a decoded token of the samples sees 142 (of 16) or 370 (of 64)."""


def measure_floors(*, quick: bool = False) -> dict[str, float]:
    """bytes_per_s of reading memory and flops_per_s of a large float32 matmul, best of several."""
    size = (1 << 22) if quick else (1 << 28)
    array, vector = jnp.ones((size // 4 // 1024, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    read = jax.jit(lambda x, y: x @ y)  # the one reader of XLA's that uses every thread
    side = 256 if quick else 2048
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((side, side)), jnp.float32)
    multiply = jax.jit(lambda a: a @ a)
    return {
        "bytes_per_s": size / _best(lambda: read(array, vector)),
        "flops_per_s": 2 * side**3 / _best(lambda: multiply(matrix)),
    }


def model_floors(config: ModelConfig, *, bytes_per_s: float, flops_per_s: float) -> dict[str, Any]:
    """Floors of a decode step for some batch sizes at CONTEXT_TOKENS, in milliseconds."""
    weights = matmul_weights(config)
    weight_bytes = weights * jnp.dtype(config.dtype).itemsize
    kv_bytes = CONTEXT_TOKENS * block_bytes(config, block_size=1)
    steps: dict[int, dict[str, float]] = {}
    for rows in (1, 4, 16, 32, 64):
        steps[rows] = {
            "weight_bytes_ms": weight_bytes / bytes_per_s * 1e3,
            "kv_bytes_ms": rows * kv_bytes / bytes_per_s * 1e3,
            "flops_ms": 2 * rows * weights / flops_per_s * 1e3,
        }
    lines = [
        f"memory reads {bytes_per_s / 1e9:.1f} GB/s, float32 matmul {flops_per_s / 1e9:.0f} GFLOP/s"
    ]
    for rows, floor in steps.items():
        least = max(floor["weight_bytes_ms"], floor["flops_ms"]) + floor["kv_bytes_ms"]
        where = f"{rows} rows at context {CONTEXT_TOKENS}"
        lines.append(f"{where}: {least:.1f} ms, {rows / least * 1e3:.0f} tokens/s")
    return {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s, "steps": steps, "lines": lines}


def matmul_weights(config: ModelConfig) -> int:
    """Weights that a decode step multiplies with, the head included."""
    heads = config.num_heads * 2 + config.num_kv_heads * 2
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _best(work: Any, tries: int = 7) -> float:
    jax.block_until_ready(work())
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)
