"""Small configs, steps and forms of attention that the tests of the models share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpage.backends import PLAIN
from jaxpage.backends.xla import Xla
from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.ops import Adapters, Backend, Model, Ops
from jaxpage.device.types import LayerKV, StepInput

Attend = Callable[[Array, Array, Array, LayerKV, StepInput, AttentionSpec], tuple[Array, LayerKV]]
NO_KV = LayerKV(k=None, v=None)
"""A layer's part of no pool."""


@dataclass(frozen=True)
class With(Xla):
    """XLA's operations around another attention."""

    attend: Attend | None = None

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        layer_kv: LayerKV,
        step: StepInput,
        *,
        spec: AttentionSpec,
    ) -> tuple[Array, LayerKV]:
        assert self.attend is not None
        return self.attend(q, k, v, layer_kv, step, spec)


def hidden_of(
    model: Model,
    params: Any,
    step: StepInput,
    attend: Attend,
    *,
    cache: Any = None,
    adapters: Adapters | None = None,
) -> tuple[Array, Any]:
    """Every token's hidden state, and the cache; without one, no layer keeps anything."""
    ops = Ops.of(step, With(attend=attend), adapters)
    cache = (NO_KV,) * model.config.num_layers if cache is None else cache
    return model.apply({"params": params}, step.tokens, step.positions, cache, ops)


def logits_of(model: Model, params: Any, hidden: Array, backend: Backend = PLAIN) -> Array:
    return model.apply({"params": params}, hidden, backend, method="logits")


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


def dense_attention(
    q: Array, k: Array, v: Array, layer_kv: LayerKV, *of: Any
) -> tuple[Array, LayerKV]:
    """Causal attention among the tokens of one step; keeps no cache, knows no soft cap."""
    step, spec = of
    group = q.shape[1] // k.shape[1]
    keys, values = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    row = jnp.sum(token[:, None] >= step.query_starts[None, 1:], axis=1)
    behind = step.positions[:, None] - step.positions[None, :]
    seen = (row[:, None] == row[None, :]) & (behind >= 0)
    if spec.window is not None:
        seen &= behind < spec.window
    scores = jnp.einsum("tnh,unh->ntu", q, keys).astype(jnp.float32) * spec.scale
    weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("ntu,unh->tnh", weights.astype(v.dtype), values), layer_kv


def storing_attention(
    q: Array, k: Array, v: Array, layer_kv: LayerKV, *of: Any
) -> tuple[Array, LayerKV]:
    """Writes k and v in place and reads one slot a token back: a backend's memory traffic."""
    step, _ = of
    shape = layer_kv.k.shape
    k_pool, v_pool = (
        pool.reshape(-1, *shape[2:]).at[step.slots].set(new, mode="drop", unique_indices=True)
        for pool, new in ((layer_kv.k, k), (layer_kv.v, v))
    )
    read = k_pool[step.positions] + v_pool[step.positions]
    out = q + jnp.repeat(read, q.shape[1] // shape[2], axis=1)
    return out, LayerKV(k=k_pool.reshape(shape), v=v_pool.reshape(shape))
