"""Rotary positions, against plain NumPy and against Hugging Face's to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.backends import PLAIN
from jaxpage.config import ModelConfig, RopeKind, RopeScaling
from jaxpage.device.ops import Ops
from jaxpage.models.layers import inverse_frequencies, rotary_cos_sin
from tests.models.toys import prompt_step, toy_config


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
    ops = Ops.of(step, PLAIN)
    plain = rotary_cos_sin(toy_config(), step.positions, ops)[0]
    grown = rotary_cos_sin(toy_config(rope_scaling=scaling), step.positions, ops)[0]
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
