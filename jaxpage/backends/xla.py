"""Every operation in plain XLA: runs on any device, and is what other backends extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from jaxpage.config import AttentionSpec
from jaxpage.device.attention.store import store_then_attend
from jaxpage.device.attention.xla import attend_xla
from jaxpage.device.sampling.sample import argmax_logsumexp
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.weights import Weight, dense

MAX_PINNED_TOKENS = 32
"""Most rows for which the pinned product (weights as left operand) is faster on a CPU.

All products of SmolLM2-135M in one step, float32, jax 0.10.2, two threads, elapsed ms, on two
machines whose large float32 products reach 134 and 290 GFLOP/s:

    rows                    4    8   16   32   64
    134     plain          53   61   69   96  165
            pinned         28   35   44   72  154
    290     plain          35   39   48   68   94
            pinned         32   38   50   80  107

Few rows are bound by reading the weights, many by arithmetic. From 64 rows on (prefill) the plain
form takes less processor time too: 243 against 294 ms at 128 rows, 796 against 1086 at 512.
"""


@dataclass(frozen=True)
class Xla:
    """The operations of `jaxpage.device.ops.Backend`, which states what each must return."""

    shares_prefixes: bool = True
    """Whether leading blocks that rows have in common are read once."""

    @property
    def reads_groups(self) -> bool:
        return self.shares_prefixes

    @property
    def pays_for_padding(self) -> bool:
        return False

    def linear(
        self, x: Array, w: Weight, bias: Array | None = None, *, dtype: jnp.dtype | None = None
    ) -> Array:
        """float32 stays exact float32 on every device: by default a GPU would take TF32."""
        matrix = dense(w).reshape(-1, w.shape[-1])
        if x.shape[0] <= MAX_PINNED_TOKENS:
            pinned, plain = _pinned_product(dtype), _plain_product(dtype)
            y = lax.platform_dependent(x, matrix, cpu=pinned, default=plain)
        else:
            y = _plain_product(dtype)(x, matrix)
        return add_bias(y, bias)

    def rms_norm(self, x: Array, scale: Array, *, eps: float) -> Array:
        wide = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
        return (wide * inverse_rms * scale.astype(jnp.float32)[None, :]).astype(x.dtype)

    def swiglu(self, x: Array) -> Array:
        gate, up = jnp.split(x, 2, axis=-1)
        return nn.silu(gate) * up

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)

    def rope_qkv(self, qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        q, k, v = split_qkv(qkv)
        return self.rope(q, cos, sin), self.rope(k, cos, sin), v

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
        return store_then_attend(q, k, v, layer_kv, step, attend=attend_xla, spec=spec)

    def argmax_logsumexp(self, logits: Array) -> tuple[Array, Array]:
        return argmax_logsumexp(logits)


def add_bias(y: Array, bias: Array | None) -> Array:
    """y [T, out] plus a bias of any shape of `out` entries."""
    return y if bias is None else y + bias.reshape(1, -1).astype(y.dtype)


def split_qkv(qkv: Array) -> tuple[Array, Array, Array]:
    """(q [T, N, H], k [T, K, H], v [T, K, H]) of qkv [T, K, G + 2, H]."""
    num_tokens, groups, head_dim = qkv.shape[0], qkv.shape[2] - 2, qkv.shape[3]
    q = qkv[:, :, :groups].reshape(num_tokens, -1, head_dim)
    return q, qkv[:, :, groups], qkv[:, :, groups + 1]


def _precision(x: Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _plain_product(dtype: jnp.dtype | None) -> Callable[[Array, Array], Array]:
    def product(x: Array, w: Array) -> Array:
        return lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=dtype
        )

    return product


def _pinned_product(dtype: jnp.dtype | None) -> Callable[[Array, Array], Array]:
    """The weights as the left operand; the barrier keeps them there. See MAX_PINNED_TOKENS."""

    def product(x: Array, w: Array) -> Array:
        y = lax.dot_general(
            w, x, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=dtype
        )
        return lax.optimization_barrier(y).T

    return product
