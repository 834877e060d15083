"""The tiny model as a Hugging Face folder: config, weights, tokenizer and generation files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxpage.config import ModelConfig

CHAT_TEMPLATE = (
    "{{ bos_token + ' ' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
"""The question-and-answer form of the training text. A word right after the begin mark would get no
space before it, which the training text has."""


def write_folder(
    folder: Path, config: ModelConfig, params: dict[str, Any], tokenizer: Path
) -> None:
    """Writes everything that a Hugging Face folder of this model holds."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_weights(config, params), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", hf_config(config))
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(config))
    if tokenizer.resolve() != (folder / "tokenizer.model").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.model")


def hf_weights(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parameter tree of jaxpage.models.llama under Hugging Face's names, float32.

    Values are rounded to float16's, so that a float16 file of this model is exact.
    """
    hidden, groups = config.hidden_size, config.group_size
    weights = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
        "lm_head.weight": params["lm_head"]["kernel"],
    }
    for index in range(config.num_layers):
        layer, prefix = params[f"layers_{index}"], f"model.layers.{index}"
        qkv = np.asarray(layer["attention"]["qkv"]["kernel"])
        gate, up = layer["mlp"]["gate_up"]["kernel"]
        weights |= {
            f"{prefix}.input_layernorm.weight": layer["input_norm"]["scale"],
            f"{prefix}.self_attn.q_proj.weight": qkv[:, :groups].reshape(-1, hidden),
            f"{prefix}.self_attn.k_proj.weight": qkv[:, groups].reshape(-1, hidden),
            f"{prefix}.self_attn.v_proj.weight": qkv[:, groups + 1].reshape(-1, hidden),
            f"{prefix}.self_attn.o_proj.weight": layer["attention"]["out"]["kernel"],
            f"{prefix}.post_attention_layernorm.weight": layer["post_attention_norm"]["scale"],
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": layer["mlp"]["down"]["kernel"],
        }
    return {
        name: np.ascontiguousarray(np.asarray(value).astype(np.float16).astype(np.float32))
        for name, value in weights.items()
    }


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.attention_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": config.mlp_bias,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        "vocab_size": config.vocab_size,
    }


def tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """`tokenizer_config.json`, with the model's chat template."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": False,
        "model_max_length": config.max_position_embeddings,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
