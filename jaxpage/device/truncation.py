"""Which ids one draw may still take: min-p, top-k and top-p without sorting the vocabulary.

Each finds a threshold on the logits and keeps all ids that reach it, so ids with exactly the
threshold's logit are kept together where a sort would keep some of them.

Scores are logits shifted so that the largest is 0. The float32 bits of -score, read as an
integer, grow as the score falls, so 31 halvings of that integer find any threshold exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Float, Int

INFINITY_BITS = 0x7F800000
"""Of float32 infinity: every score, -inf too, is at most this."""


def truncate(
    scores: Float[Array, "blocks width"],
    *,
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""],
) -> Float[Array, "blocks width"]:
    """The scores of one draw with -inf where min-p, then top-k, then top-p cuts.

    The largest of `scores` must be 0. Off: top_k 0, top_p 1, min_p 0; then nothing is computed.
    top_p is a share of what the other two kept, as in vLLM.
    """
    is_asked = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return lax.cond(is_asked, _cut, lambda scores, *_: scores, scores, top_k, top_p, min_p)


def _cut(scores: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    scores = jnp.where(scores >= jnp.log(min_p), scores, -jnp.inf)
    depth = lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)

    def holds_k(limit: Array) -> Array:
        # Summed in two steps, so that the first one is vectorised.
        counts = lax.optimization_barrier((depth <= limit).sum(0, dtype=jnp.int32))
        return counts.sum() >= top_k

    limit = _smallest(holds_k, is_wanted=top_k > 0)
    depth = jnp.where(depth <= limit, depth, INFINITY_BITS)
    weights = jnp.where(depth < INFINITY_BITS, jnp.exp(scores), 0)
    target = top_p * weights.sum()

    def holds_p(limit: Array) -> Array:
        return jnp.where(depth <= limit, weights, 0).sum() >= target

    limit = _smallest(holds_p, is_wanted=top_p < 1)
    return jnp.where((depth <= limit) & (depth < INFINITY_BITS), scores, -jnp.inf)


def _smallest(holds: Callable[[Array], Array], *, is_wanted: Array) -> Array:
    """The smallest integer of 0 .. INFINITY_BITS that `holds`, or the largest if not wanted."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        return lax.cond(holds(middle), lambda: (low, middle), lambda: (middle + 1, high))

    low = jnp.where(is_wanted, jnp.int32(0), jnp.int32(INFINITY_BITS))
    bounds = (low, jnp.int32(INFINITY_BITS))
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[1]
