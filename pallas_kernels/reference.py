"""The oracles: each public function again in plain float32 jnp, as short as can be, for tests.

They take the same arguments, except tunings and `interpret`, read whole tables, and are
differentiable in the queries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import own_constants
from pallas_kernels.write import KVPool, dequantize, quantize

EXACT = lax.Precision.HIGHEST


@own_constants()
def paged_decode_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention [B, N, H] of each row's last token; 0 where context_lens is 0."""
    row_starts = jnp.arange(context_lens.shape[0] + 1, dtype=jnp.int32)
    return paged_prefill_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        row_starts,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
        return_lse=return_lse,
    )


@own_constants()
def paged_prefill_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention [T, N, H] of each row's last tokens; 0 for padding."""
    num_tokens, num_heads = q.shape[:2]
    num_rows = context_lens.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_live = token < query_starts[-1]
    row = jnp.minimum(jnp.searchsorted(query_starts, token, side="right") - 1, num_rows - 1)
    position = context_lens[row] - query_starts[row + 1] + token
    k = _rows(k_pool, k_scales, block_tables)[row]  # [T, M * S, K, H]
    v = _rows(v_pool, v_scales, block_tables)[row]
    slot = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    seen = (slot <= position[:, None]) & is_live[:, None]
    if sliding_window is not None:
        seen &= slot > position[:, None] - sliding_window
    # Replaced, not multiplied by 0: what no query sees may be NaN.
    k, v = (jnp.where(seen[:, :, None, None], array, 0) for array in (k, v))
    group = num_heads // k.shape[2]
    k, v = (jnp.repeat(array, group, axis=2) for array in (k, v))
    scores = jnp.einsum("tnh,tsnh->tns", q.astype(jnp.float32), k, precision=EXACT) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    weights, lse = _softmax(scores, seen[:, None, :])
    out = jnp.einsum("tns,tsnh->tnh", weights, v, precision=EXACT)
    out = jnp.where(is_live[:, None, None], out, 0).astype(q.dtype)
    return (out, lse) if return_lse else out


@own_constants()
def shared_prefix_decode_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    context_lens: Array,
    group_rows: Array,
    prefix_lens: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """The same as decode: groups tell which blocks are shared, never what a row sees."""
    del group_rows, prefix_lens
    return paged_decode_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
        return_lse=return_lse,
    )


@own_constants()
def write_kv(
    k_pool: Array,
    v_pool: Array,
    k: Array,
    v: Array,
    slots: Array,
    *,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> KVPool:
    """The pool with each token's K and V at its slot, written one token after the other."""
    arrays = {"k": (k_pool, k), "v": (v_pool, v)}
    if k_scales is not None and v_scales is not None:
        (k, new_k), (v, new_v) = quantize(k, k_pool.dtype), quantize(v, v_pool.dtype)
        arrays = {
            "k": (k_pool, k),
            "v": (v_pool, v),
            "k_scales": (k_scales, new_k),
            "v_scales": (v_scales, new_v),
        }
    written = {}
    for name, (pool, tokens) in arrays.items():
        num_blocks, size = pool.shape[:2]
        for token, slot in enumerate(slots.tolist()):
            if slot < num_blocks * size:
                pool = pool.at[slot // size, slot % size].set(tokens[token].astype(pool.dtype))
        written[name] = pool
    return KVPool(**written)


def _softmax(scores: Array, seen: Array) -> tuple[Array, Array]:
    """(weights [T, N, M * S], natural log-sum-exp [T, N]); 0 and -inf where nothing is seen."""
    largest = jnp.max(scores, axis=-1, where=seen, initial=-1e30)
    weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0)
    total = weights.sum(-1)
    divisor = jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, largest + jnp.log(divisor), -jnp.inf)
    return weights / divisor[..., None], lse


def _rows(pool: Array, scales: Array | None, tables: Array) -> Array:
    """K or V of the blocks in each row's table: float32 [B, M * S, K, H]."""
    num_rows = tables.shape[0]
    stored = pool.at[tables].get(mode="clip").reshape(num_rows, -1, *pool.shape[2:])
    if scales is None:
        return stored.astype(jnp.float32)
    own = scales.at[tables].get(mode="clip").reshape(num_rows, -1, pool.shape[2])
    return dequantize(stored, own)
