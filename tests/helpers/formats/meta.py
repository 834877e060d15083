"""Writes Meta's folders: `consolidated.NN.pth`, `params.json`, `tokenizer.model`.

Rotary pairs are neighbours here (x0 y0 x1 y1 ...), halves in Hugging Face (x0 x1 ... y0 y1 ...).
How a tensor is cut over shards follows `llama/model.py` of Meta's release: ColumnParallelLinear by
rows of the matrix, RowParallelLinear by columns, ParallelEmbedding by columns (LLaMA 1 and 2),
VocabParallelEmbedding by rows (Llama 3).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.helpers.formats.model_files import ModelFiles, Weights, head_counts

LAYER_NAMES = {
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
}
"""Meta's name: (Hugging Face's name, the axis it is cut along; None is whole in every shard)."""


def write_meta(
    model: ModelFiles,
    folder: Path,
    *,
    shards: int = 1,
    embeddings: Literal["columns", "rows"] = "columns",
    dtype: str = "float32",
) -> Path:
    """Writes a Meta folder; `embeddings` is "columns" before Llama 3, "rows" from then on."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    whole, axes = meta_weights(model, embeddings)
    kind: Any = getattr(torch, dtype)
    for shard in range(shards):
        part = {
            name: torch.from_numpy(_cut(value, axes[name], shard, shards)).to(kind)
            for name, value in whole.items()
        }
        if embeddings == "columns":
            _, _, head_dim = head_counts(model.config)
            theta = model.config["rope_theta"]
            part["rope.freqs"] = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
        torch.save(part, folder / f"consolidated.{shard:02}.pth")
    params = json.dumps(meta_params(model.config, llama3=embeddings == "rows"))
    (folder / "params.json").write_text(params)
    if model.tokenizer_model is not None:
        (folder / "tokenizer.model").write_bytes(model.tokenizer_model)
    return folder


def meta_weights(
    model: ModelFiles, embeddings: Literal["columns", "rows"]
) -> tuple[Weights, dict[str, int | None]]:
    """All tensors whole under Meta's names, and the axis that each is cut along."""
    heads, kv_heads, _ = head_counts(model.config)
    source = model.weights
    embed = source["model.embed_tokens.weight"]
    weights = {
        "tok_embeddings.weight": embed,
        "norm.weight": source["model.norm.weight"],
        "output.weight": source.get("lm_head.weight", embed),
    }
    axes: dict[str, int | None] = {
        "tok_embeddings.weight": 1 if embeddings == "columns" else 0,
        "norm.weight": None,
        "output.weight": 0,
    }
    for layer in range(model.config["num_hidden_layers"]):
        for meta_name, (hf_name, axis) in LAYER_NAMES.items():
            value = source[f"model.layers.{layer}.{hf_name}.weight"]
            if meta_name == "attention.wq":
                value = neighbours_from_halves(value, heads)
            elif meta_name == "attention.wk":
                value = neighbours_from_halves(value, kv_heads)
            weights[f"layers.{layer}.{meta_name}.weight"] = value
            axes[f"layers.{layer}.{meta_name}.weight"] = axis
    return weights, axes


def neighbours_from_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders each head's output rows: row 2 i + j comes from row j H / 2 + i.

    A bias, which is a vector of output rows, is reordered alike.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def meta_params(config: dict[str, Any], *, llama3: bool) -> dict[str, Any]:
    """`params.json`; the inner width is said through multiplier and multiple, as Meta does."""
    heads, kv_heads, _ = head_counts(config)
    inner = config["intermediate_size"]
    multiple = inner & -inner
    multiplier = inner / int(8 * config["hidden_size"] / 3)
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "vocab_size": config["vocab_size"] if llama3 else -1,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"],
    }
    if llama3 and config.get("rope_scaling"):
        params["use_scaled_rope"] = True
    return params


def _cut(value: np.ndarray, axis: int | None, shard: int, shards: int) -> np.ndarray:
    if axis is None:
        return value
    width, rest = divmod(value.shape[axis], shards)
    assert rest == 0, f"shape {value.shape} can't be cut in {shards} along axis {axis}"
    cut = [slice(None)] * value.ndim
    cut[axis] = slice(shard * width, (shard + 1) * width)
    return np.ascontiguousarray(value[tuple(cut)])
