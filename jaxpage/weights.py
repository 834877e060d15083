"""What a weight of a model may be: an array, or small integers with scales in an array's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

Leaf = Any
"""A jax.Array, or what stands for it in a tree of the same form: NumPy, a shape, a sharding."""


@register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A matrix [*out, D] as int8 and scales: a leaf of the parameters where an array would be.

    Entry d of a row is values[d] * scales[d // group]. A backend's `linear` may read this form; any
    other code multiplies with `dense`.
    """

    values: Leaf  # [*out, D] int8
    scales: Leaf  # [*out, D // group], in the dtype that the matrix stands for
    group: int = field(metadata={"static": True})  # consecutive entries that share a scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.scales.dtype

    def dense(self) -> Array:
        """The matrix [*out, D] that it stands for, in the dtype of the scales."""
        grouped = self.values.reshape(*self.scales.shape, self.group).astype(self.scales.dtype)
        return (grouped * self.scales[..., None]).reshape(self.values.shape)

    def rows(self, ids: Array) -> Array:
        """Rows `ids` [T] of a matrix [V, D]: [T, D]."""
        taken = (jnp.take(leaf, ids, axis=0, mode="clip") for leaf in (self.values, self.scales))
        return Quantized(*taken, group=self.group).dense()


Weight = Array | Quantized


def dense(weight: Weight) -> Array:
    """The weight as an array."""
    return weight.dense() if isinstance(weight, Quantized) else weight


def take_rows(weight: Weight, ids: Array) -> Array:
    """Rows `ids` [T] of a weight [V, D]: [T, D]. Ids are checked where they enter the engine."""
    if isinstance(weight, Quantized):
        return weight.rows(ids)
    return jnp.take(weight, ids, axis=0, mode="clip")  # "fill" would cost a select over [T, D]
