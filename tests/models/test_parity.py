"""Logits equal Hugging Face's for every kind of model that a LLaMA config can describe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.config import ModelConfig, RopeScaling
from jaxpage.device.inputs import prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.types import StepInput
from jaxpage.functional import forward as run_forward
from jaxpage.models.registry import build_model
from tests.models.hf import reference_decode, reference_logits, twin
from tests.models.toys import dense_attention, hidden_of, logits_of, prompt_step, toy_config

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5
ORIGINAL = 16
ROPE = {"max_position_embeddings": 64, "rope_theta": 200.0}
LLAMA3 = RopeScaling("llama3", 4.0, ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_kv_heads": 4},
    "gqa-tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "mqa-wide-heads": {"num_kv_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sliding-window": {"sliding_window": 8, "architecture": "mistral"},
    "linear": ROPE | {"rope_scaling": RopeScaling("linear", 4.0, ORIGINAL)},
    "dynamic": ROPE | {"rope_scaling": RopeScaling("dynamic", 4.0, ORIGINAL)},
    "llama3": ROPE | {"rope_scaling": LLAMA3},
}


def ours(config: ModelConfig, params: dict[str, Any], step: StepInput) -> np.ndarray:
    """Logits [T, V] of one step, without a pool."""
    return np.asarray(compiled(config)(params, step))


@functools.cache
def compiled(config: ModelConfig) -> Callable[[dict[str, Any], StepInput], Any]:
    model = build_model(config)

    @jax.jit
    def forward(params: Any, step: StepInput) -> Any:
        hidden, _ = hidden_of(model, params, step, dense_attention)
        return logits_of(model, params, hidden)

    return forward


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, count).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str) -> None:
    config = toy_config(**SHAPES[name])
    model, params = twin(config)
    ids = tokens(40)  # past ORIGINAL and past the sliding window
    expected = reference_logits(model, ids)
    assert expected.std() > 0.5, "logits so small would hide a mistake"
    np.testing.assert_allclose(
        ours(config, params, prompt_step([ids])), expected, atol=TOLERANCE, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("prompt_len", [5, ORIGINAL, 24])
def test_dynamic_scaling_equals_prefill_and_decode(prompt_len: int) -> None:
    config = toy_config(**SHAPES["dynamic"])
    model, params = twin(config)
    ids = tokens(40)
    expected = reference_decode(model, ids, prompt_len)
    actual = ours(config, params, prompt_step([ids], [prompt_len]))
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)
    # The rule shows: scaled as one prompt of 40, the same tokens give something else.
    assert np.abs(reference_logits(twin(config)[0], ids) - expected).max() > 100 * TOLERANCE


@pytest.mark.slow
def test_dynamic_scaling_is_each_rows_own() -> None:
    config = toy_config(**SHAPES["dynamic"])
    _, params = twin(config)
    rows, lengths = [tokens(20, 1), tokens(20, 2)], [20, 4]
    alone = [
        ours(config, params, prompt_step([r], [n])) for r, n in zip(rows, lengths, strict=True)
    ]
    together = ours(config, params, prompt_step(rows, lengths))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=TOLERANCE, rtol=0)


def paged(
    config: ModelConfig, params: dict[str, Any], ids: list[int], prompt_len: int, backend: str
) -> np.ndarray:
    """Logits [T, V] by way of the KV pool: the prompt in chunks of 16, then token by token."""
    model, block_size = build_model(config), 7
    table = [[5, 2, 7, 1, 6, 3]]
    forward = jax.jit(lambda *args: run_forward(model, *args, attention=backend))
    cache, logits = init_cache(config, 7, block_size), []
    for start in (*range(0, prompt_len, 16), *range(prompt_len, len(ids))):
        chunk = ids[start : start + 16] if start < prompt_len else ids[start : start + 1]
        step = prefill_input([chunk], table, block_size, starts=[start])
        every_token = jnp.arange(len(chunk), dtype=jnp.int32)
        own_prompt = jnp.asarray([prompt_len], jnp.int32)
        step = replace(step, logit_index=every_token, prompt_lens=own_prompt)
        cache, chunk_logits = forward(params, cache, step)
        logits.append(chunk_logits)
    return np.concatenate(logits)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("name", ["dynamic", "sliding-window"])
def test_chunked_prefill_and_decode_through_the_pool(name: str, backend: str) -> None:
    config = toy_config(**SHAPES[name])
    model, params = twin(config)
    ids = tokens(38)
    expected = reference_decode(model, ids, 32)
    actual = paged(config, params, ids, 32, backend)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gqa-tied", {"rms_norm_eps": 1.1e-2}),
        ("sliding-window", {"sliding_window": 9}),
        ("linear", {"rope_scaling": RopeScaling("linear", 4.1, ORIGINAL)}),
        ("llama3", {"rope_scaling": RopeScaling("llama3", 4.0, ORIGINAL, 1.0, 3.9)}),
    ],
)
def test_the_tolerance_sees_the_setting(name: str, change: dict[str, Any]) -> None:
    """With a setting slightly off, logits are off by far more than the tolerance."""
    model, params = twin(toy_config(**SHAPES[name]))
    ids = tokens(40)
    changed = ours(toy_config(**SHAPES[name] | change), params, prompt_step([ids]))
    assert np.abs(changed - reference_logits(model, ids)).max() > 20 * TOLERANCE
