"""Paged attention in plain XLA: loops over chunks of blocks with an online softmax.

Loops run to the live length, so the cost grows with the tokens in the cache, not the table's width.
Rows that share leading blocks begin with the softmax of those, read once for all of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpage.config import AttentionSpec
from jaxpage.device.attention.online_softmax import (
    EXACT,
    Softmax,
    capped,
    chunk_blocks,
    first_seen,
    gather,
    heads_first,
    whole_chunks,
)
from jaxpage.device.attention.shared_prefix import attend_prefixes
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.device.varying import vary_alike

if TYPE_CHECKING:
    from jaxtyping import Float

# Sizes measured on a two-core CPU with 9 query heads, 3 KV heads, head dim 64, float32.
ROW_CHUNK_TOKENS = 128
"""256 takes a sixth off rows of 1000 tokens and adds half to rows of 100."""
BATCH_CHUNK_TOKENS = 64
TILE_CHUNK_TOKENS = 64
TILE_TOKENS = 64
"""Queries of a prefill tile; a row's last tile is padded to it."""
MOST_MERGED_HEADS = 4
FIRST = np.int32(0)
"""An index of the type of all others, also where jax_enable_x64 makes a plain 0 a wider one."""
ENOUGH_QUERIES = 8
"""The fewest queries for which a product with one chunk's keys is worth its overhead on a CPU."""


def attend_xla(
    q: Float[Array, "T N H"],
    layer_kv: LayerKV,
    step: StepInput,
    spec: AttentionSpec,
) -> Float[Array, "T N H"]:
    """What `attend_reference` computes, for rows of one token or packed rows of any length."""
    q, layer_kv, step = vary_alike((q, layer_kv, step))
    scaled = q.astype(jnp.float32) * spec.scale
    if not step.is_decode:
        out = _attend_tiles(scaled, layer_kv, step, spec)
    else:
        out = lax.platform_dependent(
            scaled,
            layer_kv,
            step,
            cpu=partial(decode_by_row, spec=spec),
            default=partial(decode_batch, spec=spec),
        )
    return out.astype(q.dtype)


def decode_by_row(
    q: Float[Array, "B N H"], layer_kv: LayerKV, step: StepInput, *, spec: AttentionSpec
) -> Float[Array, "B N H"]:
    """One row at a time: a CPU keeps its chunk in cache, and no row waits for a longer one.

    A row's result does not depend on the batch, to the bit. `q` is float32 and scaled.
    """
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    blocks = chunk_blocks(ROW_CHUNK_TOKENS, block_size, step.block_tables.shape[1])
    size = blocks * block_size
    tables = whole_chunks(step.block_tables, blocks)
    merged = _merged_heads(num_kv_heads, num_heads // num_kv_heads)
    queries = _merge_queries(q, num_kv_heads, merged)  # [B, K / merged, heads, merged * H]
    begin, shared = attend_prefixes(q, layer_kv, step, spec=spec)
    if shared is not None:
        acc = _merge_queries(shared.acc.reshape(q.shape), num_kv_heads, merged)
        largest, total = (part.reshape(acc.shape[:-1]) for part in (shared.max, shared.sum))
        shared = Softmax(largest, total, acc)

    def add_row(row: Array | int, out: Array) -> Array:
        end = step.context_lens[row]
        start = jnp.maximum(first_seen(end - 1, spec.window), begin[row])

        def add_chunk(chunk: Array | int, state: Softmax) -> Softmax:
            ids = lax.dynamic_slice(tables, (row, chunk * blocks), (1, blocks))[0]
            key = chunk * size + jnp.arange(size, dtype=jnp.int32)
            live = (key < end) & (key >= start)
            k, v = heads_first(*gather(layer_kv, ids, live), merged)
            scores = jnp.einsum("mnx,msx->mns", queries[row], k, precision=EXACT)
            return state.add(capped(scores, spec.soft_cap), live[None, None], "mns,msx->mnx", v)

        last = (end + size - 1) // size
        state = Softmax.empty(*queries.shape[1:], like=q) if shared is None else shared.at(row)
        state = lax.fori_loop(start // size, last, add_chunk, state)
        return out.at[row].set(state.result())

    is_live = step.context_lens > 0
    num_live = jnp.max(jnp.where(is_live, jnp.arange(1, num_rows + 1, dtype=jnp.int32), 0))
    out = lax.fori_loop(jnp.int32(0), num_live, add_row, vary_alike(jnp.zeros_like(queries), q))
    return _split_result(out, merged, head_dim)


def decode_batch(
    q: Float[Array, "B N H"], layer_kv: LayerKV, step: StepInput, *, spec: AttentionSpec
) -> Float[Array, "B N H"]:
    """All rows at once, to the longest row's end. `q` is float32 and scaled."""
    num_rows, _, head_dim = q.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    width = step.block_tables.shape[1]
    blocks = chunk_blocks(BATCH_CHUNK_TOKENS, block_size, width)
    size = blocks * block_size
    tables = whole_chunks(step.block_tables, blocks)
    ends = step.context_lens
    begin, shared = attend_prefixes(q, layer_kv, step, spec=spec)
    starts = jnp.maximum(first_seen(ends - 1, spec.window), begin)
    queries = q.reshape(num_rows, num_kv_heads, -1, head_dim)

    def add_chunk(chunk: Array | int, state: Softmax) -> Softmax:
        ids = lax.dynamic_slice_in_dim(tables, chunk * blocks, blocks, axis=1)
        key = chunk * size + jnp.arange(size, dtype=jnp.int32)
        live = (key[None] < ends[:, None]) & (key[None] >= starts[:, None])
        k, v = gather(layer_kv, ids, live)  # [B, size, K, H]
        scores = jnp.einsum("bkgh,bskh->bkgs", queries, k, precision=EXACT)
        return state.add(capped(scores, spec.soft_cap), live[:, None, None], "bkgs,bskh->bkgh", v)

    first = jnp.min(jnp.where(ends > 0, starts, width * block_size)) // size
    last = (jnp.max(ends) + size - 1) // size
    state = lax.fori_loop(first, last, add_chunk, shared or Softmax.empty(*queries.shape, like=q))
    return state.result().reshape(q.shape)


def _attend_tiles(q: Array, layer_kv: LayerKV, step: StepInput, spec: AttentionSpec) -> Array:
    """Tiles of up to TILE_TOKENS queries of one row against chunks of that row's keys."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    blocks = chunk_blocks(TILE_CHUNK_TOKENS, block_size, step.block_tables.shape[1])
    size = blocks * block_size
    tile = min(TILE_TOKENS, num_tokens)
    tables = whole_chunks(step.block_tables, blocks)
    num_queries = jnp.diff(step.query_starts)
    tiles = (num_queries + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def add_tile(index: Array | int, out: Array) -> Array:
        row = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
        skipped = (index - tile_ends[row] + tiles[row]) * tile
        begin = step.query_starts[row] + skipped
        count = jnp.minimum(num_queries[row] - skipped, tile)
        first_query = step.context_lens[row] - num_queries[row] + skipped
        end = first_query + count
        start = first_seen(first_query, spec.window)
        position = first_query + jnp.arange(tile, dtype=jnp.int32)  # of the queries
        queries = lax.dynamic_slice(padded, (begin, FIRST, FIRST), (tile, num_heads, head_dim))
        queries = queries.reshape(tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)

        def add_chunk(chunk: Array | int, state: Softmax) -> Softmax:
            ids = lax.dynamic_slice(tables, (row, chunk * blocks), (1, blocks))[0]
            key = chunk * size + jnp.arange(size, dtype=jnp.int32)
            live = (key < end) & (key >= start)
            k, v = heads_first(*gather(layer_kv, ids, live), 1)  # [K, size, H]
            seen = (key[None] <= position[:, None]) & live[None]
            if spec.window is not None:
                seen &= key[None] > position[:, None] - spec.window
            scores = jnp.einsum("kgth,ksh->kgts", queries, k, precision=EXACT)
            return state.add(capped(scores, spec.soft_cap), seen[None, None], "kgts,ksh->kgth", v)

        last = (end + size - 1) // size
        state = lax.fori_loop(start // size, last, add_chunk, Softmax.empty(*queries.shape, like=q))
        result = state.result().transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim)
        result = jnp.where((jnp.arange(tile, dtype=jnp.int32) < count)[:, None, None], result, 0)
        return lax.dynamic_update_slice(out, result, (begin, FIRST, FIRST))

    # A tile may reach into the next row; that row is written after it.
    out = lax.fori_loop(
        jnp.int32(0), tile_ends[-1], add_tile, vary_alike(jnp.zeros_like(padded), q)
    )
    return out[:num_tokens]


def _merged_heads(num_kv_heads: int, group: int) -> int:
    """KV heads that share a product, so that it has enough queries for a CPU's matrix kernels.

    Each query is padded with zeros where the other heads' keys are: more arithmetic, less time.
    """
    divisors = [m for m in range(1, MOST_MERGED_HEADS + 1) if num_kv_heads % m == 0]
    return next((m for m in divisors if m * group >= ENOUGH_QUERIES), divisors[-1])


def _merge_queries(q: Array, num_kv_heads: int, merged: int) -> Array:
    """[B, K / merged, merged * G, merged * H]: queries beside zeros for the other merged heads.

    merged 2, one query a head: (a | 0), (0 | b)
    """
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    q = q.reshape(num_rows, num_kv_heads // merged, merged, group, 1, head_dim)
    own = jnp.eye(merged, dtype=jnp.bool_).reshape(1, 1, merged, 1, merged, 1)
    wide = jnp.where(own, q, 0)
    return wide.reshape(num_rows, num_kv_heads // merged, merged * group, merged * head_dim)


def _split_result(result: Array, merged: int, head_dim: int) -> Array:
    """[B, N, H] of [B, K / merged, merged * G, merged * H]: each head's own part."""
    num_rows, num_products = result.shape[:2]
    wide = result.reshape(num_rows, num_products, merged, -1, merged, head_dim)
    own = jnp.diagonal(wide, axis1=2, axis2=4)  # [B, K / merged, G, H, merged]
    return jnp.moveaxis(own, -1, 2).reshape(num_rows, -1, head_dim)
