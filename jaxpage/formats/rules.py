"""How a rule of a family's tables is applied: a stored tensor into its part of a leaf and back.

Filling and its inverse are the same reshape seen from both ends, so import and export share the
tables. `Rule` is in `jaxpage.models.family`, the tables are in `jaxpage.models.families`. Worked
example of an interleaved rule, for heads of H = 6:

    stored rows   0 1 2 3 4 5   = pairs (0 1) (2 3) (4 5)
    our rows      0 2 4 1 3 5   = first of each pair, then second of each pair
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from jaxpage.fields import words
from jaxpage.formats.tensors import Tensor
from jaxpage.models.family import Rule

EMBEDDING, HEAD = "embed/embedding", "lm_head/kernel"
"""Paths in every family's tree; the head's only if it is not tied to the embedding."""

# Buffers that follow from the config; many old exports stored them.
_DERIVED = words(
    "freqs freqs_cis inv_freq original_inv_freq cos_cached sin_cached rotary_cos rotary_sin "
    "_cos_cached _sin_cached cos_sin_cache masked_bias position_ids causal_mask"
)
# Derived only inside a rotary module: elsewhere such a name could be a parameter's.
_DERIVED_IN_ROTARY = words("cos sin cos_cache sin_cache")


def is_derived(name: str, shape: tuple[int, ...]) -> bool:
    """True for rotary tables and causal masks: they follow from the config.

    `attn.bias` of shape [1, 1, T, T] is a mask too; of another shape it would be a parameter.
    """
    parents, _, last = name.rpartition(".")
    is_mask = last == "bias" and parents.endswith(("attn", "attention")) and len(shape) == 4
    is_table = last in _DERIVED_IN_ROTARY and parents.endswith("rotary_emb")
    return is_mask or is_table or last in _DERIVED


def source_of(rules: tuple[Rule, ...], target: str) -> str:
    """The name in the file of the tensor that fills a leaf; "" where no rule fills it."""
    return next((rule.source for rule in rules if rule.target == target), "")


def named_by_embedding(
    tensors: Mapping[str, Tensor], rules: tuple[Rule, ...]
) -> Mapping[str, Tensor]:
    """The tensors of a tied model, the shared matrix under the embedding's name: some files store
    it under the head's."""
    embedding, head = source_of(rules, EMBEDDING), source_of(rules, HEAD)
    if embedding in tensors or head not in tensors:
        return tensors
    return {embedding if name == head else name: tensor for name, tensor in tensors.items()}


def source_shape(rule: Rule, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the stored tensor that fills the rule's part of a leaf of `leaf_shape`.

    A part's leading axes are one axis of rows in the file: [K, G, H, D] of a leaf is [K G H, D].
    """
    if not rule.part:
        return leaf_shape
    whole = (slice(None),) * (len(leaf_shape) - len(rule.part))
    shape = tuple(
        len(range(size)[cut]) for size, cut in zip(leaf_shape, rule.part + whole, strict=True)
    )
    is_bias = rule.target is not None and rule.target.endswith("bias")
    num_row_axes = len(shape) - (0 if is_bias else 1)
    return (math.prod(shape[:num_row_axes]), *shape[num_row_axes:])


def fill(rule: Rule, leaf: NDArray[Any], stored: NDArray[Any]) -> None:
    """Copy a stored tensor into its part of `leaf`, casting to the leaf's dtype."""
    part = leaf[rule.part]
    if not rule.interleaved:
        part[...] = stored.reshape(part.shape)
        return
    num_kv_heads, num_heads, size, *rest = part.shape
    pairs = stored.reshape(num_kv_heads, num_heads, size // 2, 2, *rest)
    # Splitting an axis of a view gives a view, so this writes through to the leaf.
    halves = part.reshape(num_kv_heads, num_heads, 2, size // 2, *rest, copy=False)
    halves[...] = pairs.swapaxes(2, 3)


def extract(rule: Rule, leaf: NDArray[Any]) -> NDArray[Any]:
    """The stored tensor that `fill` would have read: the inverse, for export."""
    part, shape = leaf[rule.part], source_shape(rule, leaf.shape)
    if not rule.interleaved:
        return part.reshape(shape)
    num_kv_heads, num_heads, size, *rest = part.shape
    halves = part.reshape(num_kv_heads, num_heads, 2, size // 2, *rest)
    return halves.swapaxes(2, 3).reshape(shape)
