"""The parts of all loops of paged attention: an online softmax and chunks of gathered blocks.

The online softmax is that of FlashAttention (Dao et al. 2022, algorithm 1); its state for one
query is the largest score so far, the sum of weights and the weighted sum of V, all float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.types import LayerKV
from jaxpage.device.varying import vary_alike

MASKED = -1e30
"""A finite floor for masked scores: -inf minus -inf would be NaN."""
EXACT = lax.Precision.HIGHEST
"""Exact float32: by default a GPU would take TF32."""


class Softmax(NamedTuple):
    """An online softmax: max and sum [...], acc [..., H]."""

    max: Array
    sum: Array
    acc: Array

    @classmethod
    def empty(cls, *shape: int, like: Array) -> Softmax:
        """The softmax of no keys, its `acc` of this shape, varying over the mesh axes of `like`.

        Its max lies so far above MASKED that masked keys weigh nothing before any seen one.
        """
        zeros = jnp.zeros(shape, jnp.float32)
        lowest = jnp.full(shape[:-1], MASKED / 2, jnp.float32)
        return vary_alike(cls(lowest, zeros[..., 0], zeros), like)

    def at(self, row: Array | int) -> Softmax:
        """The softmax of one row."""
        return Softmax(self.max[row], self.sum[row], self.acc[row])

    def add(self, scores: Array, seen: Array, weigh: str, values: Array) -> Softmax:
        """The softmax with more scores [..., keys], those `seen`; `weigh` is the einsum of weights
        and V."""
        scores = jnp.where(seen, scores, MASKED)
        largest = jnp.maximum(self.max, scores.max(-1))
        weights = jnp.exp(scores - largest[..., None])
        rescale = jnp.exp(self.max - largest)
        return Softmax(
            largest,
            self.sum * rescale + weights.sum(-1),
            self.acc * rescale[..., None] + jnp.einsum(weigh, weights, values, precision=EXACT),
        )

    def result(self) -> Array:
        """acc over sum; 0 where nothing was seen."""
        return self.acc / jnp.maximum(self.sum, jnp.finfo(jnp.float32).tiny)[..., None]


def capped(scores: Array, soft_cap: float | None) -> Array:
    """Scores held within +-soft_cap."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def chunk_blocks(tokens: int, block_size: int, table_width: int) -> int:
    """Blocks of a chunk of about so many tokens."""
    return min(max(1, tokens // block_size), table_width)


def whole_chunks(tables: Array, blocks: int) -> Array:
    """Tables [B, M] widened to whole chunks: JAX moves a slice that reaches past the end."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))


def first_seen(position: Array, window: int | None) -> Array:
    """The first position that a query at `position` sees."""
    if window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - window + 1, 0)


def gather(layer_kv: LayerKV, ids: Array, live: Array) -> tuple[Array, Array]:
    """K and V of blocks `ids` [..., blocks] as float32 [..., tokens, K, H]; live is [..., tokens].

    V is 0 where not live: a weight of 0 times a stale NaN would be NaN. K may hold anything
    there, since such scores are replaced, not multiplied.
    """

    def taken(pool: Array) -> Array:
        num_blocks, _, num_kv_heads, head_dim = pool.shape
        flat = pool.reshape(num_blocks, -1).at[ids].get(mode="clip")
        return flat.reshape(*live.shape, num_kv_heads, head_dim)

    v = jnp.where(live[..., None, None], taken(layer_kv.v), 0)
    return taken(layer_kv.k).astype(jnp.float32), v.astype(jnp.float32)


def heads_first(k: Array, v: Array, merged: int) -> tuple[Array, Array]:
    """[tokens, K, H] twice as [K / merged, tokens, merged * H]: one matrix for each product.

    The barrier keeps XLA from folding the transpose into strides that slow its products down.
    """
    tokens, _, head_dim = k.shape
    k, v = (array.reshape(tokens, -1, merged * head_dim).transpose(1, 0, 2) for array in (k, v))
    return lax.optimization_barrier((k, v))
