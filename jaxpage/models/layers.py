"""What every model here is made of: modules that hold weights, and rotary positions.

Knows no cache, no backend and no architecture: `ops` decides how things are computed. Arrays are
[T, ...], one row a token; weights are [out, in].
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from jaxpage.config import ModelConfig, RopeScaling
from jaxpage.device.ops import Backend, Ops
from jaxpage.weights import take_rows

INITIALIZERS = {
    "scale": nn.initializers.ones,
    "bias": nn.initializers.zeros,
    "kernel": nn.initializers.normal(0.02),
    "embedding": nn.initializers.normal(0.02),
}
"""How training of the LLaMA family starts, by a parameter's own name."""


class RMSNorm(nn.Module):
    """x / rms(x) * scale along the last axis, with its own scale [D]."""

    eps: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, ops: Ops) -> Array:
        scale = self.param("scale", INITIALIZERS["scale"], (x.shape[-1],), self.dtype)
        return ops.backend.rms_norm(x, scale, eps=self.eps)


class Linear(nn.Module):
    """A matrix product with its own weights [*features, D] and, if use_bias, a bias [*features]."""

    features: tuple[int, ...]
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, ops: Ops) -> Array:
        """x [T, D] to [T, out]; adapters find the matrix by this module's name."""
        shape = (*self.features, x.shape[-1])
        kernel = self.param("kernel", INITIALIZERS["kernel"], shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", INITIALIZERS["bias"], self.features, self.dtype)
        return ops.linear(x, kernel, bias, name=self.name)


class Head(nn.Module):
    """The matrix [V, D] that makes logits, when it is not the embedding."""

    vocab_size: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, backend: Backend) -> Array:
        """float32 logits [R, V] of hidden states [R, D]."""
        shape = (self.vocab_size, x.shape[-1])
        kernel = self.param("kernel", INITIALIZERS["kernel"], shape, self.dtype)
        return backend.linear(x, kernel, dtype=jnp.dtype(jnp.float32))


class Embedding(nn.Module):
    """A row of numbers a token id; the same matrix is the output head of tied models."""

    vocab_size: int
    hidden_size: int
    dtype: jnp.dtype

    def setup(self) -> None:
        shape = (self.vocab_size, self.hidden_size)
        self.embedding = self.param("embedding", INITIALIZERS["embedding"], shape, self.dtype)

    def __call__(self, tokens: Array) -> Array:
        """[T, D] of ids [T]."""
        return take_rows(self.embedding, tokens)

    def attend(self, x: Array, backend: Backend) -> Array:
        """float32 logits [R, V] of hidden states [R, D]."""
        return backend.linear(x, self.embedding, dtype=jnp.dtype(jnp.float32))


def rotary_cos_sin(config: ModelConfig, positions: Array, ops: Ops) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles at `positions` [T], each float32 [T, H / 2]."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        frequencies = _dynamic_frequencies(config, scaling, positions, ops.prompt_lens())
    else:
        frequencies = jnp.asarray(inverse_frequencies(config))[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair, float32 [H / 2]: plain, linear or llama3.

    `dynamic` gives the plain ones: it stretches only past the original length, by token.
    Source: `modeling_rope_utils.py` of Hugging Face transformers, whose roundings are kept: at
    position 100,000 the last bit of a float32 frequency rotates a pair by up to 0.006 radians.
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


def _dynamic_frequencies(
    config: ModelConfig, scaling: RopeScaling, positions: Array, prompt_lens: Array
) -> Array:
    """Frequencies [T, H / 2] for theta grown with the length each token was computed at.

    The length is the whole prompt for prompt tokens, however they are chunked, and position + 1
    for later ones: what Hugging Face's prefill and decode of that prompt use.
    """
    length = jnp.maximum(prompt_lens, positions + 1).astype(jnp.float32)
    original = jnp.float32(scaling.original_max_position_embeddings)
    factor = jnp.float32(scaling.factor)
    growth = factor * jnp.maximum(length, original) / original - (factor - jnp.float32(1))
    # theta grows by growth ** (H / (H - 2)), and pair i rotates by theta ** (-2 i / H).
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim - 2)
    return inverse_frequencies(config)[None, :] * growth[:, None] ** jnp.asarray(-pair)[None, :]
