"""Whole decode steps of real models, for the compile check.

    python -m pallas_kernels.check --program benchmarks.gpu.compile_steps:steps

compiles the forward program that the engine runs, over a pool of 4 GiB, for cards that are not
there. `short_steps` are the same models cut to four layers, which repeat: quick enough for CI.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpage.backends import as_backend
from jaxpage.config import ModelConfig
from jaxpage.device.kv_cache import block_bytes, init_cache
from jaxpage.device.step import hidden_step
from jaxpage.device.types import KVCache, StepShape, unpack
from jaxpage.models.registry import abstract_params, build_model
from pallas_kernels.check import Card, Program
from pallas_kernels.check.shapes import Heads, decode

POOL_BYTES = 4 * 2**30
BLOCK_SIZE = 16
ROWS, CONTEXT_TOKENS = 32, 2048
FEW_LAYERS = 4

CONFIGS = {
    "7b": ModelConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096, dtype="bfloat16"),
    "8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, dtype="bfloat16"),
    "smollm2": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 2048, dtype="bfloat16"),
}


def steps(card: Card) -> list[Program]:
    """A decode step of every model, all layers."""
    return [make_step(f"step {name}", config, card) for name, config in CONFIGS.items()]


def short_steps(card: Card) -> list[Program]:
    """The same with four layers each."""
    return [
        make_step(f"step {name}, {FEW_LAYERS} layers", replace(config, num_layers=FEW_LAYERS), card)
        for name, config in CONFIGS.items()
    ]


def make_step(
    name: str,
    config: ModelConfig,
    card: Card,
    *,
    rows: int = ROWS,
    tokens: int = CONTEXT_TOKENS,
    pool_bytes: int = POOL_BYTES,
) -> Program:
    """One decode step of `rows` rows of `tokens` tokens: (cache, draw input, hidden)."""
    model, params = build_model(config), abstract_params(config)
    num_blocks = pool_bytes // block_bytes(config, BLOCK_SIZE) - 1
    cache = jax.eval_shape(lambda: init_cache(config, num_blocks, BLOCK_SIZE))
    shape = StepShape(rows, rows, tokens // BLOCK_SIZE, rows, num_single=rows)

    def forward(params: Any, cache: KVCache, vector: Array, previous: Array) -> Any:
        step = unpack(vector, shape)
        return hidden_step(model, params, cache, step, previous, backend=as_backend("pallas"))

    heads = Heads(name, config.num_heads, config.num_kv_heads, config.head_dim)
    integers = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
    return Program(
        name,
        forward,
        (params, cache, integers, jax.ShapeDtypeStruct((rows,), jnp.int32)),
        donated=(1,),
        kernels=decode(heads, card, rows=rows, tokens=tokens).kernels,
        pools=tuple(jax.tree.leaves(cache)),
        weight_bytes=_weight_bytes(params, config),
        is_step=True,
    )


def _weight_bytes(params: dict[str, Any], config: ModelConfig) -> int:
    """Bytes that one step reads: not the embedding, of which it reads a few rows."""
    read = {name: tree for name, tree in params.items() if name not in ("embed", "lm_head")}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
