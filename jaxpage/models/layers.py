"""The few operations every model here is made of: one matrix product, RMS norm, rotary positions.

Knows no cache, no attention and no architecture. Arrays are [T, ...], a token a row; weights are
[out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax

from jaxpage.config import ModelConfig, RopeScaling

MAX_PINNED_TOKENS = 32
"""Most rows for which the pinned product is the faster one on a CPU.

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

INITIALIZERS = {
    "scale": nn.initializers.ones,
    "bias": nn.initializers.zeros,
    "kernel": nn.initializers.normal(0.02),
    "embedding": nn.initializers.normal(0.02),
}
"""How training of the LLaMA family starts, by a parameter's own name."""


class StepPositions(Protocol):
    """What rotary positions read of a step; `jaxpage.device.types.StepInput` has it."""

    @property
    def positions(self) -> Array: ...  # [T] int32
    @property
    def query_starts(self) -> Array: ...  # [B + 1] int32
    @property
    def prompt_lens(self) -> Array: ...  # [B] int32


class LinearFn(Protocol):
    """x [T, D] times w [..., D], its leading axes flattened, plus bias: what `linear` promises."""

    def __call__(
        self, x: Array, w: Array, bias: Array | None = None, *, dtype: jnp.dtype | None = None
    ) -> Array: ...


def linear(
    x: Array, w: Array, bias: Array | None = None, *, dtype: jnp.dtype | None = None
) -> Array:
    """x [T, D] times w [..., D], its leading axes flattened, plus bias of those axes: [T, out].

    The result has x's dtype, or `dtype` (accumulated in float32 all the same). float32 is exact
    float32 on every device: GPUs would take TF32 without being told.
    """
    w = w.reshape(-1, w.shape[-1])
    if x.shape[0] <= MAX_PINNED_TOKENS:
        y = lax.platform_dependent(x, w, cpu=_pinned_product(dtype), default=_plain_product(dtype))
    else:
        y = _plain_product(dtype)(x, w)
    if bias is not None:
        y = y + bias.reshape(1, -1).astype(y.dtype)
    return y


def _precision(x: Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _plain_product(dtype: jnp.dtype | None) -> Callable[[Array, Array], Array]:
    def product(x: Array, w: Array) -> Array:
        return lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=dtype
        )

    return product


def _pinned_product(dtype: jnp.dtype | None) -> Callable[[Array, Array], Array]:
    def product(x: Array, w: Array) -> Array:
        y = lax.dot_general(
            w, x, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=dtype
        )
        return lax.optimization_barrier(y).T

    return product


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    """x / rms(x) * scale along the last axis, computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * inverse_rms * scale.astype(jnp.float32)[None, :]).astype(x.dtype)


def swiglu(x: Array) -> Array:
    """silu(gate) * up of x [T, 2 F], the gate first: [T, F]."""
    gate, up = jnp.split(x, 2, axis=-1)
    return nn.silu(gate) * up


def rotate_qkv(qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    """(q [T, N, H], k [T, K, H], v [T, K, H]) of qkv [T, K, G + 2, H], q and k rotated."""
    num_tokens, groups, head_dim = qkv.shape[0], qkv.shape[2] - 2, qkv.shape[3]
    q = qkv[:, :, :groups].reshape(num_tokens, -1, head_dim)
    return rotate(q, cos, sin), rotate(qkv[:, :, groups], cos, sin), qkv[:, :, groups + 1]


@dataclass(frozen=True, slots=True)
class Ops:
    """What a model computes between its attentions, in the forms of one backend."""

    linear: LinearFn = linear
    rms_norm: Callable[..., Array] = rms_norm
    swiglu: Callable[[Array], Array] = swiglu
    rotate_qkv: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = rotate_qkv


XLA_OPS = Ops()


class RMSNorm(nn.Module):
    """`rms_norm` with its own scale [D]."""

    eps: float
    dtype: jnp.dtype
    ops: Ops = XLA_OPS

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", INITIALIZERS["scale"], (x.shape[-1],), self.dtype)
        return self.ops.rms_norm(x, scale, eps=self.eps)


class Linear(nn.Module):
    """`linear` with its own weights: [*features, D] and, on demand, a bias [*features]."""

    features: tuple[int, ...]
    use_bias: bool
    dtype: jnp.dtype
    result_dtype: jnp.dtype | None = None
    ops: Ops = XLA_OPS

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param(
            "kernel", INITIALIZERS["kernel"], (*self.features, x.shape[-1]), self.dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", INITIALIZERS["bias"], self.features, self.dtype)
        return self.ops.linear(x, kernel, bias, dtype=self.result_dtype)


def rotary_cos_sin(config: ModelConfig, step: StepPositions) -> tuple[Array, Array]:
    """Cosine and sine of every token's rotary angles, each float32 [T, H / 2]."""
    scaling = config.rope_scaling
    positions = step.positions.astype(jnp.float32)[:, None]
    if scaling is not None and scaling.kind == "dynamic":
        frequencies = _dynamic_frequencies(config, scaling, step)
    else:
        frequencies = jnp.asarray(inverse_frequencies(config))[None, :]
    angles = positions * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn each pair (x[i], x[i + H/2]) of x [T, heads, H] by its token's angle i."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair, float32 [H / 2]: plain, linear or llama3.

    `dynamic` gives the plain ones: it stretches only past the original length, by token.
    Source: `modeling_rope_utils.py` of Hugging Face transformers, whose roundings are kept: at
    position 100,000 the last bit of a float32 frequency turns a pair by up to 0.006 radians.
    """
    share = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.float64(config.rope_theta) ** share.astype(np.float64)  # float32 pow errs by 2 ulp
    plain = np.float32(1) / powers.astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    return _llama3_frequencies(plain, scaling)


def _llama3_frequencies(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Short waves stay, long ones are stretched, those between are mixed by wavelength.

    With an original length of 8192, low 1 and high 4: waves under 2048 tokens stay as they are,
    waves over 8192 are stretched.
    """
    factor = np.float32(scaling.factor)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    original = np.float32(scaling.original_max_position_embeddings)
    wavelength = np.float32(1) / plain * np.float32(2 * math.pi)  # torch divides a scalar so
    kept = (np.float32(1) / wavelength * original - low) / (high - low)
    mixed = (np.float32(1) - kept) * plain / factor + kept * plain
    is_long, is_short = wavelength > original / low, wavelength < original / high
    return np.where(is_long, plain / factor, np.where(is_short, plain, mixed))


def _dynamic_frequencies(config: ModelConfig, scaling: RopeScaling, step: StepPositions) -> Array:
    """Frequencies [T, H / 2] for theta grown with the length each token was computed at.

    The length is the whole prompt for prompt tokens, however they are chunked, and position + 1
    for later ones: what Hugging Face's prefill and decode of that prompt use.
    """
    token = jnp.arange(step.positions.shape[0], dtype=jnp.int32)
    rows_before = token[:, None] >= step.query_starts[None, 1:]
    row = jnp.minimum(jnp.sum(rows_before, axis=1, dtype=jnp.int32), step.prompt_lens.shape[0] - 1)
    length = jnp.maximum(step.prompt_lens[row], step.positions + 1).astype(jnp.float32)
    original = jnp.float32(scaling.original_max_position_embeddings)
    factor = jnp.float32(scaling.factor)
    growth = factor * jnp.maximum(length, original) / original - (factor - jnp.float32(1))
    # theta grows by growth ** (H / (H - 2)), and pair i turns by theta ** (-2 i / H).
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim - 2)
    return inverse_frequencies(config)[None, :] * growth[:, None] ** jnp.asarray(-pair)[None, :]
