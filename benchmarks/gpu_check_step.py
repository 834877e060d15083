"""The part of gpu_check that needs the engine's packages: a whole decode step, right and timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from benchmarks.gpu_check_parts import BLOCK_SIZE, Sizes, seconds_of
from benchmarks.gpu_step_check import CONFIGS
from jaxpage.config import ModelConfig
from jaxpage.device.inputs import decode_input, prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.step import forward
from jaxpage.models.registry import abstract_params, build_model, init_params

TOLERANCE = 2e-2
"""Of the largest logit: bfloat16 through all layers."""
TINY = ModelConfig(64, 32, 64, 2, 4, 2, 16, 256)
VERIFIED_LAYERS = 4


def check_step(sizes: Sizes) -> dict[str, Any]:
    """Logits of a step through the kernels against the plain oracle, and the step's time."""
    config = TINY if sizes.is_quick else CONFIGS["7b"]
    small = replace(config, num_layers=min(config.num_layers, VERIFIED_LAYERS))
    error = _error(small)
    rows, context = (2, 32) if sizes.is_quick else (32, 1024)
    taken = _seconds(config, rows, context, sizes)
    return {
        "model": f"{config.num_layers} layers of {config.hidden_size}",
        "rows": rows,
        "context": context,
        "error": error,
        "ok": error <= TOLERANCE,
        "ms": taken * 1e3,
    }


def _error(config: ModelConfig) -> float:
    """A prefill and a decode step, through the kernels and through the oracle."""
    model, params = build_model(config), init_params(config)
    tables = [[1, 2], [3, 4]]
    logits = {}
    for attention in ("pallas", "reference"):
        cache = init_cache(config, 4, BLOCK_SIZE)
        step = prefill_input([[1, 5, 9, 2, 7], [3, 4, 6]], tables, BLOCK_SIZE)
        cache, _ = forward(model, params, cache, step, attention=attention)
        step = decode_input([8, 10], [5, 3], tables, BLOCK_SIZE)
        _, logits[attention] = forward(model, params, cache, step, attention=attention)
    difference = jnp.abs(logits["pallas"] - logits["reference"]).max()
    return float(difference / jnp.abs(logits["reference"]).max())


def _seconds(config: ModelConfig, rows: int, context: int, sizes: Sizes) -> float:
    """A step of rows that all have `context` tokens; the cache is donated and comes back."""
    model, params = build_model(config), _random_params(config)
    width = context // BLOCK_SIZE
    tables = [[1 + row * width + block for block in range(width)] for row in range(rows)]
    step = decode_input([1] * rows, [context - 1] * rows, tables, BLOCK_SIZE)
    cache = [init_cache(config, rows * width, BLOCK_SIZE)]
    run = jax.jit(
        lambda params, cache, step: forward(model, params, cache, step, attention="pallas"),
        donate_argnums=1,
    )

    def call() -> Any:
        cache[0], logits = run(params, cache[0], step)
        return logits

    return seconds_of(call, min_seconds=sizes.min_seconds)


def _random_params(config: ModelConfig) -> Any:
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = random.split(random.key(0), len(leaves))
    filled = [
        random.normal(key, leaf.shape, leaf.dtype) * jnp.array(0.02, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, filled)
