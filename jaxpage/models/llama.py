"""The LLaMA family in Flax Linen.

Parameters (a plain dict; every matrix is [out, in]), for hidden D, F intermediate, N query heads,
K KV heads, G = N / K, H head dim, V vocabulary:

    embed/embedding                              [V, D]
    layers_i/input_norm/scale                    [D]
    layers_i/attention/qkv/kernel                [K, G + 2, H, D]   per KV head: its G queries, k, v
    layers_i/attention/qkv/bias                  [K, G + 2, H]      only with attention_bias
    layers_i/attention/out/kernel                [D, N * H]         query head n = k * G + g
    layers_i/attention/out/bias                  [D]                only with attention_bias
    layers_i/post_attention_norm/scale           [D]
    layers_i/mlp/gate_up/kernel                  [2, F, D]          gate, up
    layers_i/mlp/gate_up/bias                    [2, F]             only with mlp_bias
    layers_i/mlp/down/kernel                     [D, F]
    layers_i/mlp/down/bias                       [D]                only with mlp_bias
    final_norm/scale                             [D]
    lm_head/kernel                               [V, D]             absent when tied to embed

Grouping qkv by KV head (and gate with up) makes each a single matrix product today and a single
axis to shard over later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from jaxpage.config import ModelConfig
from jaxpage.models.layers import (
    INITIALIZERS,
    XLA_OPS,
    Linear,
    Ops,
    RMSNorm,
    StepPositions,
    rotary_cos_sin,
)


class Step(StepPositions, Protocol):
    """What the model reads of a step; the rest of it is for `attention`."""

    @property
    def tokens(self) -> Array: ...  # [T] int32


AttentionFn = Callable[[Array, Array, Array, Any, Any], tuple[Array, Any]]
"""(q [T, N, H], k [T, K, H], v [T, K, H], layer_kv, step) -> (out [T, N, H], layer_kv)

It stores k and v in layer_kv and knows the scale, the mask and the sliding window; q and k
arrive rotated."""

LayerCache = tuple[Any, ...]
"""One `layer_kv` a layer, opaque here."""


class Attention(nn.Module):
    """Grouped-query attention around the attention function that arrives as an argument."""

    config: ModelConfig
    ops: Ops = XLA_OPS

    @nn.compact
    def __call__(
        self,
        x: Array,  # [T, D]
        rotary: tuple[Array, Array],
        layer_kv: Any,
        step: Step,
        attention: AttentionFn,
    ) -> tuple[Array, Any]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        num_tokens = x.shape[0]
        features = (c.num_kv_heads, c.group_size + 2, c.head_dim)
        qkv = Linear(features, c.attention_bias, dtype, ops=self.ops, name="qkv")(x)
        q, k, v = self.ops.rotate_qkv(qkv.reshape(num_tokens, *features), *rotary)
        out, layer_kv = attention(q, k, v, layer_kv, step)
        out = out.reshape(num_tokens, c.num_heads * c.head_dim)
        project = Linear((c.hidden_size,), c.attention_bias, dtype, ops=self.ops, name="out")
        return project(out), layer_kv


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    config: ModelConfig
    ops: Ops = XLA_OPS

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        into = Linear((2, c.intermediate_size), c.mlp_bias, dtype, ops=self.ops, name="gate_up")
        out_of = Linear((c.hidden_size,), c.mlp_bias, dtype, ops=self.ops, name="down")
        return out_of(self.ops.swiglu(into(x)))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the stream."""

    config: ModelConfig
    ops: Ops = XLA_OPS

    @nn.compact
    def __call__(
        self,
        x: Array,  # [T, D]
        rotary: tuple[Array, Array],
        layer_kv: Any,
        step: Step,
        attention: AttentionFn,
    ) -> tuple[Array, Any]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        h = RMSNorm(c.rms_norm_eps, dtype, self.ops, name="input_norm")(x)
        h, layer_kv = Attention(c, self.ops, name="attention")(h, rotary, layer_kv, step, attention)
        x = x + h
        h = RMSNorm(c.rms_norm_eps, dtype, self.ops, name="post_attention_norm")(x)
        return x + MLP(c, self.ops, name="mlp")(h), layer_kv


_TracedOnce = nn.jit(Block, static_argnums=(5,))
"""A Block whose trace all layers share (`attention`, argument 5, is static): 30 layers cost the
Python time of one, and each is still a call of its own in the compiled program."""


class Embedding(nn.Module):
    """A row of numbers a token id; the same matrix is the output head of tied models."""

    config: ModelConfig
    ops: Ops = XLA_OPS

    def setup(self) -> None:
        shape = (self.config.vocab_size, self.config.hidden_size)
        dtype = jnp.dtype(self.config.dtype)
        self.embedding = self.param("embedding", INITIALIZERS["embedding"], shape, dtype)

    def __call__(self, tokens: Array) -> Array:
        # Ids are checked where they enter; "fill" would cost a select over [T, D].
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")

    def attend(self, x: Array) -> Array:
        return self.ops.linear(x, self.embedding, dtype=jnp.dtype(jnp.float32))


class Llama(nn.Module):
    """The decoder: `__call__` gives hidden states, `logits` the next-token logits of some."""

    config: ModelConfig
    ops: Ops = XLA_OPS

    def setup(self) -> None:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embed = Embedding(c, self.ops)
        self.layers = [_TracedOnce(c, self.ops) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps, dtype, self.ops)
        if not c.tie_word_embeddings:
            self.lm_head = Linear((c.vocab_size,), False, dtype, jnp.dtype(jnp.float32), self.ops)

    def __call__(
        self, cache: LayerCache, step: Step, attention: AttentionFn
    ) -> tuple[Array, LayerCache]:
        """Hidden states [T, D] after the final norm, and the cache with this step's k and v."""
        x = self.embed(step.tokens)
        rotary = rotary_cos_sin(self.config, step)
        new_cache = []
        for layer, layer_kv in zip(self.layers, cache, strict=True):
            x, layer_kv = layer(x, rotary, layer_kv, step, attention)
            new_cache.append(layer_kv)
        hidden = self.final_norm(x)
        if self.is_initializing():
            self.logits(hidden)  # so that the head gets its parameters
        return hidden, tuple(new_cache)

    def logits(self, hidden: Array) -> Array:
        """Logits [R, V] in float32 of hidden states [R, D]."""
        if self.config.tie_word_embeddings:
            return self.embed.attend(hidden)
        return self.lm_head(hidden)
