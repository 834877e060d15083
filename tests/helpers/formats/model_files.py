"""What a checkpoint says, independent of its format, and how to make a random one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class ModelFiles:
    """A LLaMA as Hugging Face names it."""

    config: dict[str, Any]
    """`config.json`."""
    weights: Weights
    """Tensors by their Hugging Face names, matrices [out, in], float32."""
    side_files: dict[str, bytes]
    """Tokenizer and generation files by name."""

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Reads a Hugging Face folder that holds one safetensors file."""
        sides = [folder / name for name in SIDE_FILES]
        return cls(
            config=json.loads((folder / "config.json").read_text()),
            weights=load_file(folder / "model.safetensors"),
            side_files={path.name: path.read_bytes() for path in sides if path.exists()},
        )

    @property
    def tokenizer_model(self) -> bytes | None:
        """The sentencepiece file, if there is one."""
        return self.side_files.get("tokenizer.model")


def head_counts(config: dict[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of a `config.json`."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def random_model(config: dict[str, Any], *, seed: int = 0) -> ModelFiles:
    """A model with random weights, scaled so that all parts of it matter to the logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            centre = 0.0 if name.endswith("bias") else 1.0
            weights[name] = centre + 0.2 * noise
        elif name == "model.embed_tokens.weight":
            weights[name] = 0.5 * noise
        else:
            weights[name] = noise * np.float32(1.0 / shape[1] ** 0.5)
    return ModelFiles(config, weights, {})


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that Hugging Face stores for `config`."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads, head_dim = head_counts(config)
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden, "attention_bias"),
        "self_attn.k_proj": (kv_heads * head_dim, hidden, "attention_bias"),
        "self_attn.v_proj": (kv_heads * head_dim, hidden, "attention_bias"),
        "self_attn.o_proj": (hidden, heads * head_dim, "attention_bias"),
        "mlp.gate_proj": (inner, hidden, "mlp_bias"),
        "mlp.up_proj": (inner, hidden, "mlp_bias"),
        "mlp.down_proj": (hidden, inner, "mlp_bias"),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (outs, ins, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (outs, ins)
            if config.get(bias):
                shapes[f"{prefix}.{name}.bias"] = (outs,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes
