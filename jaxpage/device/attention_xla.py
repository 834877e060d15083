"""Paged attention in plain XLA: loops over chunks of blocks with an online softmax.

Loops run to the live length, so cost follows the tokens in the cache, not the table's width.
The online softmax is that of FlashAttention (Dao et al. 2022, algorithm 1); its state for one
query is (largest score so far, sum of weights, weighted sum of V), all float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.types import LayerKV, StepInput

if TYPE_CHECKING:
    from jaxtyping import Float

MASKED = -1e30
"""A finite floor for masked scores: -inf minus -inf would be NaN."""
EXACT = lax.Precision.HIGHEST
"""float32 as promised: a GPU would take TF32 without being told."""
DECODE_CHUNK_TOKENS = 64
PREFILL_CHUNK_TOKENS = 256
PREFILL_TILE_TOKENS = 64


class Softmax(NamedTuple):
    """The online softmax: top and total [...], acc [..., H]."""

    top: Array
    total: Array
    acc: Array


def attend_xla(
    q: Float[Array, "T N H"],
    layer_kv: LayerKV,
    step: StepInput,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "T N H"]:
    """What `attend_reference` computes, for decode (T == B) or packed rows of any length."""
    is_decode = q.shape[0] == step.block_tables.shape[0]
    attend = _attend_decode if is_decode else _attend_packed
    scaled = q.astype(jnp.float32) * scale
    return attend(scaled, layer_kv, step, sliding_window).astype(q.dtype)


def _attend_decode(
    q: Array, layer_kv: LayerKV, step: StepInput, sliding_window: int | None
) -> Array:
    num_rows, _, head_dim = q.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    blocks = _chunk_blocks(DECODE_CHUNK_TOKENS, block_size, step.block_tables.shape[1])
    size = blocks * block_size
    tables = _whole_chunks(step.block_tables, blocks)
    ends = step.context_lens
    starts = _first_seen(ends - 1, sliding_window)
    queries = q.reshape(num_rows, num_kv_heads, -1, head_dim)

    def add_chunk(chunk: Array, state: Softmax) -> Softmax:
        ids = lax.dynamic_slice(tables, (0, chunk * blocks), (num_rows, blocks))
        position = chunk * size + jnp.arange(size)
        live = (position[None] < ends[:, None]) & (position[None] >= starts[:, None])
        k, v = _gather(layer_kv, ids, live)  # [B, size, K, H]
        scores = jnp.einsum("bkgh,bskh->bkgs", queries, k, precision=EXACT)
        scores = jnp.where(live[:, None, None], scores, MASKED)
        top = jnp.maximum(state.top, scores.max(-1))
        weights = jnp.where(live[:, None, None], jnp.exp(scores - top[..., None]), 0)
        fade = jnp.exp(state.top - top)
        return Softmax(
            top,
            state.total * fade + weights.sum(-1),
            state.acc * fade[..., None]
            + jnp.einsum("bkgs,bskh->bkgh", weights, v, precision=EXACT),
        )

    first = jnp.min(jnp.where(ends > 0, starts, step.block_tables.shape[1] * block_size)) // size
    last = (jnp.max(ends) + size - 1) // size
    state = lax.fori_loop(first, last, add_chunk, _empty_state(queries))
    return _finish(state).reshape(q.shape)


def _attend_packed(
    q: Array, layer_kv: LayerKV, step: StepInput, sliding_window: int | None
) -> Array:
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    group = num_heads // num_kv_heads
    blocks = _chunk_blocks(PREFILL_CHUNK_TOKENS, block_size, step.block_tables.shape[1])
    size = blocks * block_size
    tile = min(PREFILL_TILE_TOKENS, num_tokens)
    tables = _whole_chunks(step.block_tables, blocks)
    num_queries = jnp.diff(step.query_starts)
    tiles = (num_queries + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def add_tile(index: Array, out: Array) -> Array:
        row = jnp.searchsorted(tile_ends, index, side="right")
        skipped = (index - tile_ends[row] + tiles[row]) * tile
        begin = step.query_starts[row] + skipped
        count = jnp.minimum(num_queries[row] - skipped, tile)
        first_query = step.context_lens[row] - num_queries[row] + skipped
        end = first_query + count
        position = first_query + jnp.arange(tile)  # of the queries
        start = _first_seen(first_query, sliding_window)
        queries = lax.dynamic_slice(padded, (begin, 0, 0), (tile, num_heads, head_dim))
        queries = queries.reshape(tile, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)

        def add_chunk(chunk: Array, state: Softmax) -> Softmax:
            ids = lax.dynamic_slice(tables, (row, chunk * blocks), (1, blocks))[0]
            key = chunk * size + jnp.arange(size)
            live = (key < end) & (key >= start)
            k, v = _gather(layer_kv, ids, live)  # [size, K, H]
            seen = (key[None] <= position[:, None]) & live[None]
            if sliding_window is not None:
                seen &= key[None] > position[:, None] - sliding_window
            scores = jnp.einsum("kgth,skh->kgts", queries, k, precision=EXACT)
            scores = jnp.where(seen[None, None], scores, MASKED)
            top = jnp.maximum(state.top, scores.max(-1))
            weights = jnp.where(seen[None, None], jnp.exp(scores - top[..., None]), 0)
            fade = jnp.exp(state.top - top)
            return Softmax(
                top,
                state.total * fade + weights.sum(-1),
                state.acc * fade[..., None]
                + jnp.einsum("kgts,skh->kgth", weights, v, precision=EXACT),
            )

        last = (end + size - 1) // size
        state = lax.fori_loop(start // size, last, add_chunk, _empty_state(queries))
        result = _finish(state).transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim)
        result = jnp.where((jnp.arange(tile) < count)[:, None, None], result, 0)
        return lax.dynamic_update_slice(out, result, (begin, 0, 0))

    # A tile's tail reaches into the next row, which is written after it.
    out = lax.fori_loop(0, tile_ends[-1], add_tile, jnp.zeros_like(padded))
    return out[:num_tokens]


def _chunk_blocks(tokens: int, block_size: int, table_width: int) -> int:
    return min(max(1, tokens // block_size), table_width)


def _whole_chunks(tables: Array, blocks: int) -> Array:
    """Tables widened to whole chunks: a slice past the end would be moved, not cut."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))


def _first_seen(position: Array, sliding_window: int | None) -> Array:
    """The first position that a query at `position` sees."""
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - sliding_window + 1, 0)


def _gather(layer_kv: LayerKV, ids: Array, live: Array) -> tuple[Array, Array]:
    """K and V of blocks `ids` [..., blocks] as float32 [..., tokens, K, H], 0 where not live."""

    def taken(pool: Array) -> Array:
        num_blocks, _, num_kv_heads, head_dim = pool.shape
        flat = pool.reshape(num_blocks, -1).at[ids].get(mode="clip")
        flat = flat.reshape(*live.shape, num_kv_heads, head_dim)
        return jnp.where(live[..., None, None], flat, 0).astype(jnp.float32)

    return taken(layer_kv.k), taken(layer_kv.v)


def _empty_state(queries: Array) -> Softmax:
    return Softmax(
        jnp.full(queries.shape[:-1], MASKED, jnp.float32),
        jnp.zeros(queries.shape[:-1], jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )


def _finish(state: Softmax) -> Array:
    return state.acc / jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)[..., None]
