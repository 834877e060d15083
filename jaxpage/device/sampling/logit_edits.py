"""Forbids and biases single ids of one draw: allowed ids, stop ids held back, logit bias.

The order is that of vLLM's sampler; here it does not matter, since -inf plus a bias stays -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jaxpage.device.sampling.per_row import replace_rows
from jaxpage.device.types import DrawInput, LogitEdits

if TYPE_CHECKING:
    from jaxtyping import Float


def edit_logits(
    logits: Float[Array, "R V"], edits: LogitEdits, draw: DrawInput
) -> Float[Array, "R V"]:
    """The logits after each draw's edits."""
    vocab_size, positions = logits.shape[1], draw.positions
    asked = (
        (edits.bias_ids < vocab_size).any(-1)
        | (~edits.allowed).any(-1)
        | (positions < edits.min_position)
    )
    return replace_rows(asked, _edit_row, logits, logits, edits, positions)


def _edit_row(row: Array, edits: LogitEdits, position: Array) -> Array:
    bits = (edits.allowed[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    row = jnp.where(bits.reshape(-1)[: row.size] == 1, row, -jnp.inf)
    stops = jnp.where(position < edits.min_position, edits.stop_ids, row.size)
    row = row.at[stops].set(-jnp.inf, mode="drop")
    return row.at[edits.bias_ids].add(edits.bias_values, mode="drop")
