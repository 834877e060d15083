"""One random token: the key of a draw, and the inverse of its cumulative distribution.

A key is a function of (seed, sample index, position) and nothing else, so a token does not depend
on the rest of the batch, order, padding, preemption or restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt32


def draw_key(
    seed_words: UInt32[Array, "2"], sample_index: Int[Array, ""], position: Int[Array, ""]
) -> Array:
    """The key of one token: `fold_in(fold_in(key(seed), sample_index), position)`."""
    key = jax.random.wrap_key_data(seed_words, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)


def sample_categorical(key: Array, weights: Float[Array, "blocks width"]) -> Int[Array, ""]:
    """A flat index with probability proportional to its weight; never one of weight 0.

    Two uniform numbers, one for the block and one inside it: a cumulative sum as long as the
    vocabulary would cost more and lose small weights in rounding. All weights 0: the last index.
    """
    uniform = jax.random.uniform(key, (2,), jnp.float32)
    block = _invert(weights.sum(-1), uniform[0])
    return block * weights.shape[1] + _invert(weights[block], uniform[1])


def _invert(weights: Array, uniform: Array) -> Array:
    """The first index whose cumulative weight passes `uniform` of the total."""
    sums = jnp.cumsum(weights)
    # A rounded sum can grow where the weight is 0, hence the second condition; and it can end
    # below the target, hence the last resort.
    is_past = (sums > uniform * sums[-1]) & (weights > 0)
    last = weights.size - 1 - jnp.argmax(weights[::-1] > 0)
    return jnp.where(is_past.any(), jnp.argmax(is_past), last).astype(jnp.int32)
