"""Hugging Face configs: what is read, what is refused by name, and that writing inverts it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage.config import ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError
from jaxpage.formats.hf_config import parse_hf_config, write_generation_config, write_hf_config
from tests.helpers.formats.variants import BASE, VARIANTS

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_hf_config(BASE | changes, generation or {}, "config.json")


def without(*keys: str, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in (BASE | changes).items() if key not in keys}
    return parse_hf_config(values, {}, "config.json")


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_under_every_name(key: str, place: str) -> None:
    found = parse(**{place: {key: "llama3", **LLAMA3}}).rope_scaling
    assert found == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


def test_rope_parameters_carry_theta() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    found = without("rope_theta", "rope_scaling", rope_parameters=rope)
    assert (found.rope_theta, found.rope_scaling) == (5e5, None)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_stretched_length_is_factor_times_the_stated_one(kind: str) -> None:
    found = parse(max_position_embeddings=4096, rope_scaling={"type": kind, "factor": 4.0})
    assert found.rope_scaling == RopeScaling(kind, 4.0, 4096)  # type: ignore[arg-type]  # two kinds
    assert found.max_position_embeddings == 16384


def test_llama3_length_is_the_stated_one() -> None:
    rope = {"rope_type": "llama3", **LLAMA3}
    assert parse(max_position_embeddings=131072, rope_scaling=rope).max_position_embeddings == (
        131072
    )


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    found = without("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    assert (found.num_kv_heads, found.rms_norm_eps) == (4, 1e-6)
    assert (found.rope_theta, found.tie_word_embeddings) == (10000.0, False)


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, 4096), ({"sliding_window": 7}, 7), ({"sliding_window": None}, None)]
)
def test_mistral_has_a_window_unless_it_says_null(given: dict[str, Any], wanted: int) -> None:
    assert parse(architectures=["MistralForCausalLM"], **given).sliding_window == wanted


def test_llama_ignores_a_window_as_transformers_does() -> None:
    assert parse(sliding_window=4096).sliding_window is None


def test_generation_config_says_where_text_ends() -> None:
    assert parse(eos_token_id=2).eos_token_ids == (2,)
    assert parse({"eos_token_id": [5, 6, 5]}, eos_token_id=2).eos_token_ids == (5, 6, 2)
    assert parse({"eos_token_id": 5}, eos_token_id=[2, 5]).eos_token_ids == (5, 2)
    assert parse_hf_config(
        {key: value for key, value in BASE.items() if key != "eos_token_id"},
        {"eos_token_id": 5},
        "config.json",
    ).eos_token_ids == (5,)
    assert parse({"eos_token_id": None}, eos_token_id=[2, 3]).eos_token_ids == (2, 3)


def test_configs_of_known_models_are_read() -> None:
    """Keys that SmolLM2, TinyLlama, Vicuna and old LLaMA exports carry besides."""
    found = parse(
        architectures=["LLaMAForCausalLM"],
        _name_or_path="x",
        is_llama_config=True,
        rope_interleaved=False,
        transformers_version="4.42.3",
        initializer_range=0.02,
        pretraining_tp=1,
        use_cache=True,
        max_sequence_length=2048,
        pad_token_id=0,
        attention_dropout=0.0,
        **{"transformers.js_config": {"dtype": "q4"}},
    )
    assert found == parse()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 9.0}}, "high_freq"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"head_dim": 10**30}, "head_dim"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"num_attention_heads": 3}, "hidden size"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(**changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_writing_is_the_inverse_of_reading(name: str) -> None:
    config = parse(**VARIANTS[name])
    written = parse_hf_config(write_hf_config(config), write_generation_config(config), "x")
    assert written == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"max_position_embeddings": 2**30}, "max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 1e29}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0**30}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": float("nan")}}, "factor"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"eos_token_id": 2**31}, "token id"),
        ({"bos_token_id": 2**31}, "token id"),
        ({"eos_token_id": list(range(10**6))}, "end ids"),
        ({"eos_token_id": [[2]]}, "eos_token_id"),
        ({"architectures": {"a": 1}}, "architecture"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"a" * 10**6: "b" * 10**6}, "unknown key"),
        ({"a\nb": "c\nd"}, "unknown key"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_no_model_has_are_one_short_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        parse(**changes)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
