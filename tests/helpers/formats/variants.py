"""The kinds of small random model that every format and every backend is tried with."""

from __future__ import annotations

from typing import Any

from tests.helpers.formats.model_files import ModelFiles, random_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "wide_heads": {"head_dim": 16},
    "odd_vocab": {"vocab_size": 97},
    "theta": {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic_rope": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 12,
    },
    "llama3_rope": {
        "head_dim": 16,  # so that two of the eight wavelengths lie between the rule's two bounds
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING},
    },
    "llama31_rope": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            **LLAMA3_SCALING,
            "original_max_position_embeddings": 8192,
        },
    },
    "rope_parameters": {
        "max_position_embeddings": 512,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 20000.0, **LLAMA3_SCALING},
    },
    "several_ends": {"eos_token_id": [2, 5]},
    "sliding_window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 6,
    },
}
"""What each variant changes in BASE. Prompts of 20 tokens reach past the window, and past the
length from which dynamic scaling sets in."""


def variant(name: str, *, seed: int = 0) -> ModelFiles:
    """The random model called `name` in VARIANTS; the same every time."""
    config = BASE | VARIANTS[name]
    if "rope_parameters" in config:
        del config["rope_scaling"], config["rope_theta"]
    return random_model(config, seed=seed)
