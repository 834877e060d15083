"""The matrix product, the norm and the rotary positions, each against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpage.config import ModelConfig, RopeKind, RopeScaling
from jaxpage.models import layers
from jaxpage.models.layers import (
    MAX_PINNED_TOKENS,
    RMSNorm,
    inverse_frequencies,
    linear,
    rotary_cos_sin,
    rotate,
)
from tests.models.toys import prompt_step, toy_config


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("num_tokens", [1, 3, MAX_PINNED_TOKENS, MAX_PINNED_TOKENS + 1])
def test_linear_is_a_matrix_product(num_tokens: int) -> None:
    x, w, bias = normal(num_tokens, 24), normal(2, 3, 4, 24, seed=1), normal(2, 3, 4, seed=2)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).reshape(24, 24).T
    np.testing.assert_allclose(linear(x, w), expected, atol=1e-5)
    np.testing.assert_allclose(
        linear(x, w, bias), expected + np.asarray(bias).reshape(1, -1), atol=1e-5
    )


def test_linear_is_pinned_on_a_cpu_and_plain_elsewhere() -> None:
    small, large, w = normal(4, 8), normal(MAX_PINNED_TOKENS + 1, 8), normal(6, 8)

    def lowered(x: Array, platform: str) -> str:
        return jax.jit(linear).trace(x, w).lower(lowering_platforms=(platform,)).as_text()

    assert "optimization_barrier" in lowered(small, "cpu")
    assert "optimization_barrier" not in lowered(large, "cpu")
    assert "optimization_barrier" not in lowered(small, "cuda")
    # A GPU would otherwise take TF32.
    assert "precision = [HIGHEST, HIGHEST]" in lowered(small, "cuda")
    assert "precision = [HIGHEST, HIGHEST]" in lowered(large, "cuda")


def test_pinned_and_plain_products_agree() -> None:
    x, w = normal(5, 64), normal(48, 64, seed=1)
    pinned, plain = layers._pinned_product(None), layers._plain_product(None)
    np.testing.assert_allclose(jax.jit(pinned)(x, w), jax.jit(plain)(x, w), atol=1e-5)
    bfloat = [a.astype(jnp.bfloat16) for a in (x, w)]
    assert layers._pinned_product(jnp.dtype("float32"))(*bfloat).dtype == jnp.float32


@pytest.mark.parametrize("num_tokens", [3, MAX_PINNED_TOKENS + 1])
def test_the_gradient_of_linear(num_tokens: int) -> None:
    x, w, target = normal(num_tokens, 8), normal(2, 3, 8, seed=1), normal(num_tokens, 6, seed=2)
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(linear(x, w) * target), (0, 1)))(x, w)
    np.testing.assert_allclose(dx, target @ w.reshape(6, 8), atol=1e-5)
    np.testing.assert_allclose(dw, (target.T @ x).reshape(2, 3, 8), atol=1e-4)


def test_linear_follows_vmap() -> None:
    x, w = normal(2, 3, 8), normal(6, 8)
    np.testing.assert_allclose(jax.vmap(linear, (0, None))(x, w), x @ w.T, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rms_norm_computes_in_float32(dtype: str) -> None:
    # 300 squared overflows float16, and squares of 3e-4 vanish in it.
    x = jnp.asarray([[300.0, -400.0], [3e-4, 4e-4]], dtype)
    scale = jnp.asarray([1.5, 0.5], dtype)
    actual = RMSNorm(1e-12, jnp.dtype(dtype)).apply({"params": {"scale": scale}}, x)
    assert isinstance(actual, Array) and actual.dtype == dtype
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True)) * [1.5, 0.5]
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance)


def test_rotate_turns_pairs_half_a_head_apart() -> None:
    x = jnp.asarray([[[1.0, 0.0, 0.0, 2.0]]])  # pairs (1, 0) and (0, 2)
    angles = np.asarray([[np.pi / 2, np.pi]])
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    np.testing.assert_allclose(rotate(x, cos, sin)[0, 0], [0.0, 0.0, 1.0, -2.0], atol=1e-6)
    assert rotate(x.astype(jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def scaled(kind: RopeKind) -> ModelConfig:
    scaling = RopeScaling(kind, 8.0, 8192)
    return toy_config(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)


def test_scaled_frequencies() -> None:
    plain = inverse_frequencies(toy_config(head_dim=64, rope_theta=500_000.0))
    np.testing.assert_allclose(plain, 500_000.0 ** -(np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_array_equal(inverse_frequencies(scaled("linear")), plain / 8)
    np.testing.assert_array_equal(inverse_frequencies(scaled("dynamic")), plain)
    llama3 = inverse_frequencies(scaled("llama3"))
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(llama3[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_array_equal(llama3[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any() and np.all(np.diff(llama3) < 0)
    assert np.all((plain / 8 < llama3) & (llama3 < plain), where=between)


@pytest.mark.slow
def test_dynamic_scaling_leaves_short_sequences_exactly_alone() -> None:
    scaling = RopeScaling("dynamic", 4.0, 16)
    step = prompt_step([range(16), range(20)], [16, 12])
    plain = rotary_cos_sin(toy_config(), step)[0]
    grown = rotary_cos_sin(toy_config(rope_scaling=scaling), step)[0]
    np.testing.assert_array_equal(grown[:32], plain[:32])  # lengths 12 to 16
    assert not np.any(np.all(grown[32:] == plain[32:], axis=1))  # lengths 17 to 20


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", [None, "linear", "llama3"])
def test_frequencies_are_transformers_to_the_bit(kind: RopeKind | None, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope: dict[str, object] = {"rope_type": kind or "default", "rope_theta": theta}
    if kind is not None:
        rope |= {"factor": 8.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=64, max_position_embeddings=131_072, rope_parameters=rope)
    )
    scaling = None if kind is None else scaled(kind).rope_scaling
    config = toy_config(head_dim=64, rope_theta=theta, rope_scaling=scaling)
    np.testing.assert_array_equal(inverse_frequencies(config), theirs.inv_freq.numpy())
