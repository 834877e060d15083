"""Which ids one draw may still take: min-p, top-k and top-p without sorting the vocabulary.

Each finds a threshold and keeps all ids whose logit reaches it: of ids with equal logits, all are
kept or none, where a sort would keep some of them.

Scores, here, are logits shifted so that the largest is 0. The float32 bits of -score, read as an
integer, are its depth: they grow as the score falls, so 31 halvings find any threshold exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.varying import vary_alike

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEVER = 0x7F800000
"""The bits of float32 infinity: the depth of a score of -inf, and no depth is larger."""
NEAR_SCORES = 64
"""Largest scores that are searched first: top-k and top-p seldom reach further."""
NEAR_WIDTH = 64


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
    depth, nearest = _depth(scores), _depth(_largest(scores))

    def holds_k(limit: Array) -> Array:
        # Summed in two steps, so that the first one is vectorised.
        counts = lax.optimization_barrier((depth <= limit).sum(0, dtype=jnp.int32))
        return counts.sum(dtype=jnp.int32) >= top_k

    limit = _smallest(holds_k, is_wanted=top_k > nearest.size)
    is_near = (top_k > 0) & (top_k <= nearest.size)
    limit = jnp.where(is_near, nearest[jnp.clip(top_k - 1, 0, nearest.size - 1)], limit)

    depth, nearest = (jnp.where(part <= limit, part, NEVER) for part in (depth, nearest))
    weights = _weights(depth)
    target = top_p * weights.sum()

    def holds_p(limit: Array) -> Array:
        return jnp.where(depth <= limit, weights, 0).sum() >= target

    is_enough = jnp.cumsum(_weights(nearest)) >= target
    is_near, is_wanted = is_enough.any(), top_p < 1
    limit = _smallest(holds_p, is_wanted=is_wanted & ~is_near)
    limit = jnp.where(is_wanted & is_near, nearest[jnp.argmax(is_enough)], limit)
    return jnp.where((depth <= limit) & (depth < NEVER), scores, -jnp.inf)


def _depth(scores: Array) -> Array:
    return lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)


def _weights(depth: Array) -> Array:
    return jnp.exp(-lax.bitcast_convert_type(depth, jnp.float32))


def _largest(scores: Array) -> Array:
    """The NEAR_SCORES largest scores, falling: most thresholds are among them.

    The NEAR_SCORES blocks with the largest maxima hold them all.
    """
    blocks = scores.reshape(-1, NEAR_WIDTH)
    if len(blocks) > NEAR_SCORES:
        blocks = blocks[lax.top_k(blocks.max(-1), NEAR_SCORES)[1]]
    return lax.top_k(blocks.reshape(-1), min(blocks.size, NEAR_SCORES))[0]


def _smallest(holds: Callable[[Array], Array], *, is_wanted: Array) -> Array:
    """The smallest integer of 0 .. NEVER for which `holds` is true; NEVER if not wanted."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_enough = holds(middle)
        return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

    first = jnp.where(is_wanted, jnp.int32(0), jnp.int32(NEVER))
    bounds = vary_alike((first, jnp.int32(NEVER)))
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[1]
