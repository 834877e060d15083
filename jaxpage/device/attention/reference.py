"""The oracle of attention: plain, slow, differentiable, float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jaxpage.config import AttentionSpec
from jaxpage.device.attention.online_softmax import EXACT, MASKED, capped
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float


@own_constants()
def attend_reference(
    q: Float[Array, "T N H"],
    layer_kv: LayerKV,
    step: StepInput,
    spec: AttentionSpec,
) -> Float[Array, "T N H"]:
    """Every token against every slot of every row's table, masked: slow, short, differentiable."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, width = step.block_tables.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row_of = step.row_of_tokens()  # B for padding
    first_query = step.context_lens - jnp.diff(step.query_starts)

    # in the row's table, so also the position in the row
    slot = jnp.arange(width * block_size, dtype=jnp.int32)
    is_stored = slot[None] < step.context_lens[:, None]  # [B, slots]
    is_seen = slot[None] <= step.positions[:, None]  # [T, slots]
    if spec.window is not None:
        is_stored &= slot[None] > first_query[:, None] - spec.window
        is_seen &= slot[None] > step.positions[:, None] - spec.window
    is_seen = is_seen[None] & is_stored[:, None]  # [B, T, slots]
    is_seen &= (row_of[None] == jnp.arange(num_rows, dtype=jnp.int32)[:, None])[..., None]

    def gather(pool: Array) -> Array:
        stored = pool[step.block_tables].reshape(num_rows, -1, num_kv_heads, head_dim)
        return jnp.where(is_stored[..., None, None], stored, 0).astype(jnp.float32)

    k, v = gather(layer_kv.k), gather(layer_kv.v)
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    mask = is_seen[:, None, None]
    scores = jnp.einsum("tkgh,bskh->bkgts", queries, k, precision=EXACT) * spec.scale
    scores = capped(scores, spec.soft_cap)
    scores = jnp.where(mask, scores, MASKED)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.maximum(weights.sum(-1), jnp.finfo(jnp.float32).tiny)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=EXACT)
    out = out / jnp.moveaxis(total, 3, 1)[..., None]
    own = out[jnp.minimum(row_of, num_rows - 1), token]  # chosen, not summed: NaN stays in its row
    return own.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
