"""Writes GGUF files as llama.cpp's converter does, through the gguf package's writer.

Rotary pairs are neighbours here, as in Meta's files. Matrices take the file's type where their
rows divide into its blocks; vectors stay float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from gguf import quants

from tests.helpers.formats.meta import neighbours_from_halves
from tests.helpers.formats.model_files import ModelFiles, Weights, head_counts

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: ModelFiles, path: Path, *, kind: str = "F32") -> ModelFiles:
    """Writes `path` with matrices of `kind` (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1).

    Returns the model with the weights that the file really holds, rounded to `kind`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, model.config)
    if model.tokenizer_model is not None:
        _add_tokenizer(writer, model)
    stored: Weights = {}
    for name, value in model.weights.items():
        own = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        stored[name] = quants.dequantize(quants.quantize(value, own), own).reshape(value.shape)
        ordered = _reorder(name, value, model.config)
        data = quants.quantize(ordered, own)
        writer.add_tensor(gguf_name(name), data, raw_dtype=own)
    factors = rope_factors(model.config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(model.config, stored, model.side_files)


def gguf_name(hf_name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem, kind = hf_name.rsplit(".", 1)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{kind}"


def rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """What llama3 scaling divides each pair's frequency by, float32 [H / 2]; None without it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    _, _, head_dim = head_counts(config)
    theta = config.get("rope_theta") or rope["rope_theta"]
    original = rope["original_max_position_embeddings"]
    long_wave = original / rope["low_freq_factor"]
    short_wave = original / rope["high_freq_factor"]
    factors = []
    for pair in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (pair / head_dim)
        if wave < short_wave:
            factors.append(1.0)
        elif wave > long_wave:
            factors.append(rope["factor"])
        else:
            turns = original / wave
            share = (turns - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)


def _reorder(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads, kv_heads, _ = head_counts(config)
    if ".q_proj." in name:
        return neighbours_from_halves(value, heads)
    if ".k_proj." in name:
        return neighbours_from_halves(value, kv_heads)
    return value


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, kv_heads, head_dim = head_counts(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_name("tiny")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: ModelFiles) -> None:
    """The pieces, scores and kinds of a sentencepiece file, padded up to the model's vocabulary."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.tokenizer_model)
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    for token_id in range(pieces.vocab_size()):
        kind = gguf.TokenType.NORMAL
        if pieces.is_unknown(token_id):
            kind = gguf.TokenType.UNKNOWN
        elif pieces.is_control(token_id):
            kind = gguf.TokenType.CONTROL
        elif pieces.is_byte(token_id):
            kind = gguf.TokenType.BYTE
        tokens.append(pieces.id_to_piece(token_id))
        scores.append(pieces.get_score(token_id))
        types.append(kind)
    for token_id in range(pieces.vocab_size(), model.config["vocab_size"]):
        tokens.append(f"[PAD{token_id}]")
        scores.append(-1000.0)
        types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    template = _chat_template(model)
    if template is not None:
        writer.add_chat_template(template)


def _chat_template(model: ModelFiles) -> str | None:
    config = json.loads(model.side_files.get("tokenizer_config.json", b"{}"))
    return config.get("chat_template")
