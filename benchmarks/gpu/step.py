"""The part that needs the engine's packages: a whole decode step, right and timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from benchmarks.gpu.compile_steps import CONFIGS
from benchmarks.gpu.kernels import BLOCK_SIZE, Sizes, free_bytes, with_shares
from benchmarks.gpu.timing import seconds_of
from benchmarks.gpu.transformers import compare_generate
from jaxpage.config import ModelConfig
from jaxpage.device.inputs import decode_input, prefill_input
from jaxpage.device.kv_cache import block_bytes, init_cache
from jaxpage.functional import forward
from jaxpage.models.registry import abstract_params, build_model, init_params

TOLERANCE = 2e-2
"""Of the largest logit: bfloat16 through all layers."""
TINY = ModelConfig(64, 32, 64, 2, 4, 2, 16, 256)
VERIFIED_LAYERS = 4


def verify_step(sizes: Sizes) -> dict[str, Any]:
    """Logits of a prefill and a decode step, through the kernels and through the plain oracle."""
    config = _config(sizes)
    error = _error(replace(config, num_layers=min(config.num_layers, VERIFIED_LAYERS)))
    return {"error": error, "tolerance": TOLERANCE, "ok": error <= TOLERANCE}


def time_step(sizes: Sizes, copy_rate: float) -> dict[str, Any]:
    """A decode step beside its roofline, then Transformers' generate with the same weights."""
    config = _config(sizes)
    params = _random_params(config)
    most_rows, context = (2, 32) if sizes.is_quick else (32, 1024)
    row_bytes = context // BLOCK_SIZE * block_bytes(config, BLOCK_SIZE)
    rows = max(1, min(most_rows, int(0.8 * free_bytes() / row_bytes)))
    taken = _seconds(config, params, rows, context, sizes)
    floor = (_read_bytes(params) + rows * row_bytes) / copy_rate
    row = {
        "case": f"step of {config.num_layers} layers of {config.hidden_size}, {rows} x {context}",
        "us": taken * 1e6,
        "share": floor / taken,
        "of": "copy",
    }
    peers = {"Transformers": compare_generate(config, params, rows, context, sizes)}
    return row | {"peers": with_shares(peers, row)}


def _config(sizes: Sizes) -> ModelConfig:
    return TINY if sizes.is_quick else CONFIGS["7b"]


def _error(config: ModelConfig) -> float:
    """The largest difference of two steps' logits, over the largest logit."""
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


def _seconds(config: ModelConfig, params: Any, rows: int, context: int, sizes: Sizes) -> float:
    """A step of rows that all have `context` tokens; the cache is donated and comes back."""
    model = build_model(config)
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


def _read_bytes(params: dict[str, Any]) -> int:
    """Bytes of weights that one step reads: not the embedding, of which it reads a few rows."""
    read = {name: tree for name, tree in params.items() if name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _random_params(config: ModelConfig) -> Any:
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = random.split(random.key(0), len(leaves))
    filled = [
        random.normal(key, leaf.shape, leaf.dtype) * jnp.array(0.02, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, filled)
