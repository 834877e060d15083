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

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.ops import Backend, Ops
from jaxpage.models.layers import Embedding, Head, Linear, RMSNorm, rotary_cos_sin

LayerCache = tuple[Any, ...]
"""One `layer_kv` a layer, opaque here."""


class Attention(nn.Module):
    """Grouped-query attention; `ops` decides what is stored and what a query sees."""

    config: ModelConfig
    spec: AttentionSpec

    @nn.compact
    def __call__(
        self,
        x: Array,  # [T, D]
        rotary: tuple[Array, Array],  # cosine and sine [T, H / 2]
        layer_kv: Any,
        ops: Ops,
    ) -> tuple[Array, Any]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        features = (c.num_kv_heads, c.group_size + 2, c.head_dim)
        qkv = Linear(features, c.attention_bias, dtype, name="qkv")(x, ops)
        q, k, v = self.heads(qkv.reshape(-1, *features), rotary, ops)
        out, layer_kv = ops.attention(q, k, v, layer_kv, self.spec)
        project = Linear((c.hidden_size,), c.attention_bias, dtype, name="out")
        return project(out.reshape(-1, c.num_heads * c.head_dim), ops), layer_kv

    def heads(
        self, qkv: Array, rotary: tuple[Array, Array], ops: Ops
    ) -> tuple[Array, Array, Array]:
        """(q [T, N, H], k [T, K, H], v [T, K, H]) of qkv [T, K, G + 2, H], as attention takes them.

        A family with a norm on q and k, for example, overrides this.
        """
        return ops.backend.rope_qkv(qkv, *rotary)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, ops: Ops) -> Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        gate_up = Linear((2, c.intermediate_size), c.mlp_bias, dtype, name="gate_up")
        down = Linear((c.hidden_size,), c.mlp_bias, dtype, name="down")
        return down(ops.backend.swiglu(gate_up(x, ops)), ops)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    attention: ClassVar[type[Attention]] = Attention
    mlp: ClassVar[type[MLP]] = MLP

    config: ModelConfig
    spec: AttentionSpec

    @nn.compact
    def __call__(
        self,
        x: Array,  # [T, D]
        rotary: tuple[Array, Array],
        layer_kv: Any,
        ops: Ops,
    ) -> tuple[Array, Any]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        h = RMSNorm(c.rms_norm_eps, dtype, name="input_norm")(x, ops)
        h, layer_kv = self.attention(c, self.spec, name="attention")(h, rotary, layer_kv, ops)
        x = x + h
        h = RMSNorm(c.rms_norm_eps, dtype, name="post_attention_norm")(x, ops)
        return x + self.mlp(c, name="mlp")(h, ops), layer_kv


TracedOnce = nn.jit(Block)
"""A Block traced once for all layers of one spec: 30 layers cost the Python time of one, and each
is still a call of its own in the compiled program."""


class Llama(nn.Module):
    """The decoder: `__call__` gives hidden states, `logits` the next-token logits of some."""

    block: ClassVar[Any] = TracedOnce
    """Its layers; those of a family that extends this go through `nn.jit` once too."""

    config: ModelConfig

    @property
    def head(self) -> tuple[str, ...]:
        """The names, at the top of the parameters, that `logits` reads."""
        return ("embed",) if self.config.tie_word_embeddings else ("lm_head",)

    def setup(self) -> None:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embed = Embedding(c.vocab_size, c.hidden_size, dtype)
        self.layers = [self.block(c, c.attention_spec(i)) for i in range(c.num_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps, dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Head(c.vocab_size, dtype)

    def __call__(
        self, tokens: Array, positions: Array, cache: LayerCache, ops: Ops
    ) -> tuple[Array, LayerCache]:
        """Hidden states [T, D] after the final norm, and the cache with this step's k and v.

        `tokens` and `positions` are int32 [T].
        """
        x = self.embed(tokens)
        rotary = rotary_cos_sin(self.config, positions, ops)
        new_cache = []
        for index, (layer, layer_kv) in enumerate(zip(self.layers, cache, strict=True)):
            x, layer_kv = layer(x, rotary, layer_kv, ops.layer(f"layers_{index}"))
            new_cache.append(layer_kv)
        hidden = self.final_norm(x, ops)
        if self.is_initializing():
            self.logits(hidden, ops.backend)  # so that the head gets its parameters
        return hidden, tuple(new_cache)

    def logits(self, hidden: Array, backend: Backend) -> Array:
        """Logits [R, V] in float32 of hidden states [R, D]."""
        if self.config.tie_word_embeddings:
            return self.embed.attend(hidden, backend)
        return self.lm_head(hidden, backend)
