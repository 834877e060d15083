"""Small configs, steps and attention functions that the tests of the models share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpage.config import ModelConfig
from jaxpage.device.types import StepInput
from jaxpage.models.llama import AttentionFn


def toy_config(**changes: Any) -> ModelConfig:
    """A config of two layers; `changes` are fields of ModelConfig."""
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    return ModelConfig(**{**fields, **changes})


def prompt_step(
    rows: Sequence[Sequence[int]], prompt_lens: Sequence[int] | None = None
) -> StepInput:
    """A step that feeds every row from its position 0; a row may go on past its prompt."""
    lengths = [len(row) for row in rows]
    starts = [0, *itertools.accumulate(lengths)]
    num_tokens = starts[-1]

    def int32(values: Iterable[int]) -> Array:
        return jnp.asarray(list(values), jnp.int32)

    return StepInput(
        tokens=int32(itertools.chain(*rows)),
        positions=int32(itertools.chain(*map(range, lengths))),
        slots=int32(range(16, 16 + num_tokens)),  # block 0 is the null block
        block_tables=jnp.zeros((len(rows), 1), jnp.int32),
        context_lens=int32(lengths),
        query_starts=int32(starts),
        token_source=jnp.zeros(len(rows), jnp.int32),
        prompt_lens=int32(lengths if prompt_lens is None else prompt_lens),
        logit_index=int32(end - 1 for end in starts[1:]),
    )


def dense_attention(sliding_window: int | None = None) -> AttentionFn:
    """Causal attention among the tokens of one step; keeps no cache."""

    def attend(q: Array, k: Array, v: Array, layer_kv: Any, step: Any) -> tuple[Array, Any]:
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        keys, values = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.sum(token[:, None] >= step.query_starts[None, 1:], axis=1)
        behind = step.positions[:, None] - step.positions[None, :]
        seen = (row[:, None] == row[None, :]) & (behind >= 0)
        if sliding_window is not None:
            seen &= behind < sliding_window
        scores = jnp.einsum("tnh,unh->ntu", q, keys).astype(jnp.float32) * head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("ntu,unh->tnh", weights.astype(v.dtype), values), layer_kv

    return attend


def storing_attention(
    q: Array, k: Array, v: Array, layer_kv: tuple[Array, Array], step: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Writes k and v in place and reads one slot a token back: a backend's memory traffic."""
    num_blocks, block_size, num_kv_heads, head_dim = layer_kv[0].shape
    flat = (num_blocks * block_size, num_kv_heads, head_dim)
    k_pool, v_pool = (
        pool.reshape(flat).at[step.slots].set(new, mode="drop", unique_indices=True)
        for pool, new in zip(layer_kv, (k, v), strict=True)
    )
    read = k_pool[step.positions] + v_pool[step.positions]
    out = q + jnp.repeat(read, q.shape[1] // num_kv_heads, axis=1)
    return out, (k_pool.reshape(layer_kv[0].shape), v_pool.reshape(layer_kv[1].shape))
