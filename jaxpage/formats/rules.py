"""Which stored tensor is which part of our parameter tree: three tables and one way to read them.

A rule says that a stored tensor fills one slot of one leaf. Filling and its inverse are the same
reshape seen from both ends, so import and export share the tables:

    leaf attention/qkv/kernel [K, G + 2, H, D]:   slot q -> [:, :G]   k -> [:, G]   v -> [:, G + 1]
    leaf mlp/gate_up/kernel   [2, F, D]:          slot gate -> [0]    up -> [1]
    every other leaf:                             slot whole -> [...]

`interleaved` rules belong to formats whose rotary pairs lie side by side in a head (Meta, GGUF);
ours, as Hugging Face, keeps them in halves. Worked example for H = 6:

    stored rows   0 1 2 3 4 5   = pairs (0 1) (2 3) (4 5)
    our rows      0 2 4 1 3 5   = first of each pair, then second of each pair
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from jaxpage.config import ModelConfig
from jaxpage.fields import words
from jaxpage.formats.tensors import Tensor

Slot = Literal["whole", "q", "k", "v", "gate", "up"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One stored tensor. `{i}` stands for the layer; without a target it is known and dropped."""

    source: str
    target: str | None
    slot: Slot = "whole"
    interleaved: bool = False


HF_RULES: tuple[Rule, ...] = (
    Rule("model.embed_tokens.weight", "embed/embedding"),
    Rule("model.layers.{i}.input_layernorm.weight", "layers_{i}/input_norm/scale"),
    Rule("model.layers.{i}.self_attn.q_proj.weight", "layers_{i}/attention/qkv/kernel", "q"),
    Rule("model.layers.{i}.self_attn.k_proj.weight", "layers_{i}/attention/qkv/kernel", "k"),
    Rule("model.layers.{i}.self_attn.v_proj.weight", "layers_{i}/attention/qkv/kernel", "v"),
    Rule("model.layers.{i}.self_attn.q_proj.bias", "layers_{i}/attention/qkv/bias", "q"),
    Rule("model.layers.{i}.self_attn.k_proj.bias", "layers_{i}/attention/qkv/bias", "k"),
    Rule("model.layers.{i}.self_attn.v_proj.bias", "layers_{i}/attention/qkv/bias", "v"),
    Rule("model.layers.{i}.self_attn.o_proj.weight", "layers_{i}/attention/out/kernel"),
    Rule("model.layers.{i}.self_attn.o_proj.bias", "layers_{i}/attention/out/bias"),
    Rule(
        "model.layers.{i}.post_attention_layernorm.weight", "layers_{i}/post_attention_norm/scale"
    ),
    Rule("model.layers.{i}.mlp.gate_proj.weight", "layers_{i}/mlp/gate_up/kernel", "gate"),
    Rule("model.layers.{i}.mlp.up_proj.weight", "layers_{i}/mlp/gate_up/kernel", "up"),
    Rule("model.layers.{i}.mlp.gate_proj.bias", "layers_{i}/mlp/gate_up/bias", "gate"),
    Rule("model.layers.{i}.mlp.up_proj.bias", "layers_{i}/mlp/gate_up/bias", "up"),
    Rule("model.layers.{i}.mlp.down_proj.weight", "layers_{i}/mlp/down/kernel"),
    Rule("model.layers.{i}.mlp.down_proj.bias", "layers_{i}/mlp/down/bias"),
    Rule("model.norm.weight", "final_norm/scale"),
    Rule("lm_head.weight", "lm_head/kernel"),
)

META_RULES: tuple[Rule, ...] = (
    Rule("tok_embeddings.weight", "embed/embedding"),
    Rule("layers.{i}.attention_norm.weight", "layers_{i}/input_norm/scale"),
    Rule("layers.{i}.attention.wq.weight", "layers_{i}/attention/qkv/kernel", "q", True),
    Rule("layers.{i}.attention.wk.weight", "layers_{i}/attention/qkv/kernel", "k", True),
    Rule("layers.{i}.attention.wv.weight", "layers_{i}/attention/qkv/kernel", "v"),
    Rule("layers.{i}.attention.wo.weight", "layers_{i}/attention/out/kernel"),
    Rule("layers.{i}.ffn_norm.weight", "layers_{i}/post_attention_norm/scale"),
    Rule("layers.{i}.feed_forward.w1.weight", "layers_{i}/mlp/gate_up/kernel", "gate"),
    Rule("layers.{i}.feed_forward.w3.weight", "layers_{i}/mlp/gate_up/kernel", "up"),
    Rule("layers.{i}.feed_forward.w2.weight", "layers_{i}/mlp/down/kernel"),
    Rule("norm.weight", "final_norm/scale"),
    Rule("output.weight", "lm_head/kernel"),
)

GGUF_RULES: tuple[Rule, ...] = (
    Rule("token_embd.weight", "embed/embedding"),
    Rule("blk.{i}.attn_norm.weight", "layers_{i}/input_norm/scale"),
    Rule("blk.{i}.attn_q.weight", "layers_{i}/attention/qkv/kernel", "q", True),
    Rule("blk.{i}.attn_k.weight", "layers_{i}/attention/qkv/kernel", "k", True),
    Rule("blk.{i}.attn_v.weight", "layers_{i}/attention/qkv/kernel", "v"),
    Rule("blk.{i}.attn_q.bias", "layers_{i}/attention/qkv/bias", "q", True),
    Rule("blk.{i}.attn_k.bias", "layers_{i}/attention/qkv/bias", "k", True),
    Rule("blk.{i}.attn_v.bias", "layers_{i}/attention/qkv/bias", "v"),
    Rule("blk.{i}.attn_output.weight", "layers_{i}/attention/out/kernel"),
    Rule("blk.{i}.attn_output.bias", "layers_{i}/attention/out/bias"),
    Rule("blk.{i}.ffn_norm.weight", "layers_{i}/post_attention_norm/scale"),
    Rule("blk.{i}.ffn_gate.weight", "layers_{i}/mlp/gate_up/kernel", "gate"),
    Rule("blk.{i}.ffn_up.weight", "layers_{i}/mlp/gate_up/kernel", "up"),
    Rule("blk.{i}.ffn_gate.bias", "layers_{i}/mlp/gate_up/bias", "gate"),
    Rule("blk.{i}.ffn_up.bias", "layers_{i}/mlp/gate_up/bias", "up"),
    Rule("blk.{i}.ffn_down.weight", "layers_{i}/mlp/down/kernel"),
    Rule("blk.{i}.ffn_down.bias", "layers_{i}/mlp/down/bias"),
    Rule("output_norm.weight", "final_norm/scale"),
    Rule("output.weight", "lm_head/kernel"),
    # Rotary stretching as a table; the config reader turns it back into its rule.
    Rule("rope_freqs.weight", None),
    Rule("blk.{i}.attn_rot_embd", None),
    Rule("blk.{i}.attn_rot_embd.weight", None),
)

# Buffers that follow from the config, as old exports of every kind stored them.
_DERIVED = words(
    "freqs freqs_cis inv_freq original_inv_freq cos_cached sin_cached rotary_cos rotary_sin "
    "_cos_cached _sin_cached cos_sin_cache masked_bias position_ids causal_mask"
)
# So only inside of a rotary module: elsewhere such a name could be a parameter's.
_DERIVED_IN_ROTARY = words("cos sin cos_cache sin_cache")


def is_derived(name: str, shape: tuple[int, ...]) -> bool:
    """True for rotary tables and causal masks: nothing in them that the config doesn't say.

    `attn.bias` of shape [1, 1, T, T] is a mask too; of another shape it would be a parameter.
    """
    parents, _, last = name.rpartition(".")
    is_mask = last == "bias" and parents.endswith(("attn", "attention")) and len(shape) == 4
    is_table = last in _DERIVED_IN_ROTARY and parents.endswith("rotary_emb")
    return is_mask or is_table or last in _DERIVED


def named_by_embedding(
    tensors: Mapping[str, Tensor], rules: tuple[Rule, ...]
) -> Mapping[str, Tensor]:
    """The tensors of a tied model by the embedding's name: some store the head's alone."""
    embedding, head = (
        next(rule.source for rule in rules if rule.target == target)
        for target in ("embed/embedding", "lm_head/kernel")
    )
    if embedding in tensors or head not in tensors:
        return tensors
    return {embedding if name == head else name: tensor for name, tensor in tensors.items()}


def source_shape(rule: Rule, leaf_shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Shape of the stored tensor that fills the rule's slot of a leaf of `leaf_shape`.

    A slot's leading axes are one axis of rows in the file: q of [K, G + 2, H, D] is [K G H, D].
    """
    if rule.slot == "whole":
        return leaf_shape
    axis, _, length = _cut(rule.slot, config)
    slot_shape = (*leaf_shape[:axis], length, *leaf_shape[axis + 1 :])
    is_bias = rule.target is not None and rule.target.endswith("bias")
    num_row_axes = len(slot_shape) - (0 if is_bias else 1)
    return (math.prod(slot_shape[:num_row_axes]), *slot_shape[num_row_axes:])


def fill(rule: Rule, leaf: NDArray[Any], stored: NDArray[Any], config: ModelConfig) -> None:
    """Copy a stored tensor into its slot of `leaf`, casting to the leaf's dtype."""
    slot = _slot(rule, leaf, config)
    if not rule.interleaved:
        slot[...] = stored.reshape(slot.shape)
        return
    num_kv_heads, num_heads, size, *rest = slot.shape
    pairs = stored.reshape(num_kv_heads, num_heads, size // 2, 2, *rest)
    # Splitting an axis of a view gives a view, so this writes through to the leaf.
    halves = slot.reshape(num_kv_heads, num_heads, 2, size // 2, *rest, copy=False)
    halves[...] = pairs.swapaxes(2, 3)


def extract(rule: Rule, leaf: NDArray[Any], config: ModelConfig) -> NDArray[Any]:
    """The stored tensor that `fill` would have read: the inverse, for export."""
    slot = _slot(rule, leaf, config)
    shape = source_shape(rule, leaf.shape, config)
    if not rule.interleaved:
        return slot.reshape(shape)
    num_kv_heads, num_heads, size, *rest = slot.shape
    halves = slot.reshape(num_kv_heads, num_heads, 2, size // 2, *rest)
    return halves.swapaxes(2, 3).reshape(shape)


def _slot(rule: Rule, leaf: NDArray[Any], config: ModelConfig) -> NDArray[Any]:
    """The slot as a view of the leaf that keeps every axis."""
    if rule.slot == "whole":
        return leaf
    axis, start, length = _cut(rule.slot, config)
    return leaf[(slice(None),) * axis + (slice(start, start + length),)]


def _cut(slot: Slot, config: ModelConfig) -> tuple[int, int, int]:
    """(axis of the leaf, first entry, number of entries) of a slot that is not the whole leaf."""
    cuts: dict[Slot, tuple[int, int, int]] = {
        "q": (1, 0, config.group_size),
        "k": (1, config.group_size, 1),
        "v": (1, config.group_size + 1, 1),
        "gate": (0, 0, 1),
        "up": (0, 1, 1),
    }
    return cuts[slot]
