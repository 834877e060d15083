"""Paged prefill attention: the last tokens of several rows, packed one row after the other.

context_lens  5  3  9   query_starts  0  2  3  7     T = 9
row           0  0  1  2  2  2  2  .  .              row 0: its tokens 3 and 4; row 1: a decode row
position      3  4  2  5  6  7  8  .  .              row 2: its last 4 of 9; then two of padding
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import _arguments
from pallas_kernels._arguments import Scoring
from pallas_kernels._compat import call, load, own_constants, store
from pallas_kernels._tiles import NOWHERE, PoolRefs, Spec, attend, tile_rows
from pallas_kernels.config import Tuning
from pallas_kernels.write import KVPool


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
    tuning: Tuning | None = None,
    interpret: bool | None = None,
) -> Array | tuple[Array, Array]:
    """Causal attention [T, N, H] of each row's last tokens, in q's dtype; float32 inside.

    q [T, N, H]: row b's queries are q[query_starts[b]:query_starts[b + 1]], its last tokens, whose
    K and V are in the pool already. query_starts int32 [B + 1], not decreasing, from 0; a row of
    one query is a decode row, a row of none is allowed, and tokens beyond the last entry are
    padding: their result is exactly 0. The rest is as in `paged_decode_attention`.
    """
    pool = KVPool(k_pool, v_pool, k_scales, v_scales)
    scoring = Scoring(scale, sliding_window, soft_cap)
    _arguments.check(q, pool, block_tables, (context_lens, query_starts), scoring)
    out, lse = _prefill(
        q,
        pool,
        block_tables,
        context_lens,
        query_starts,
        scoring=scoring,
        tuning=tuning or _arguments.choose_for("prefill", q, pool),
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


class _Tiles(NamedTuple):
    """Which queries each program takes. The padding tokens are a row of their own, row B."""

    row: Array  # [tiles] the tile's row; B + 1: the tile is not used
    first: Array  # [tiles] the tile's first query, counted in its row
    starts: Array  # [B + 2] query_starts and T
    lengths: Array  # [B + 1] context_lens and 0


@partial(jax.jit, static_argnames=("scoring", "tuning", "interpret"))
def _prefill(
    q: Array,
    pool: KVPool,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
    *,
    scoring: Scoring,
    tuning: Tuning,
    interpret: bool | None,
) -> tuple[Array, Array]:
    num_tokens, num_heads, head_dim = q.shape
    most_rows = num_tokens * (num_heads // pool.k.shape[2])
    spec = _arguments.make_spec(q, pool, block_tables, scoring, tuning, most_rows=most_rows)
    tiles = _cut(context_lens, query_starts, num_tokens, spec.query_rows // spec.tile_heads)
    out, lse = call(
        partial(_attend_tile, spec=spec),
        q.reshape(-1, head_dim),
        *tiles,
        block_tables.reshape(-1),
        *_arguments.flatten(pool).arrays(),
        name="paged_prefill",
        grid=(spec.num_kv_heads * spec.tiles_per_head, tiles.row.shape[0]),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens * num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tokens * num_heads,), jnp.float32),
        ],
        tuning=tuning,
        interpret=interpret,
    )
    return out.reshape(q.shape), lse.reshape(num_tokens, num_heads)


def _cut(context_lens: Array, query_starts: Array, num_tokens: int, tile: int) -> _Tiles:
    """Cuts each row's queries into tiles of `tile`; as many tiles as T could ever need."""
    num_rows = context_lens.shape[0]
    starts = jnp.concatenate([query_starts, jnp.full((1,), num_tokens, jnp.int32)])
    lengths = jnp.concatenate([context_lens, jnp.zeros((1,), jnp.int32)])
    tiles = -(-jnp.diff(starts) // tile)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(num_tokens // tile + num_rows + 1, dtype=jnp.int32)
    # Compared with all rows at once: a search would be a loop, which a CUDA graph can't hold.
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    own = jnp.minimum(row, num_rows)
    return _Tiles(row, (index - (ends - tiles)[own]) * tile, starts, lengths)


def _attend_tile(q: Any, *refs: Any, spec: Spec) -> None:
    """The kernel of one tile.

    Grid: (query tiles of all KV heads, tiles of tokens, of which the last come first: they have the
    most to read). Refs: q [T * N, H], the fields of _Tiles, the tables [B * M], the pool; outputs
    out [T * N, H] and natural log-sum-exp [T * N].
    """
    tile_row, tile_first, starts, lengths, tables, *pool, out, lse = refs
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    num_rows = lengths.shape[0] - 1  # without the row of padding
    is_tile = tile_row[tile] <= num_rows
    row = jnp.minimum(tile_row[tile], num_rows)
    num_queries = starts[row + 1] - starts[row]
    past = lengths[row] - num_queries  # position of the row's first query
    kv_head, query, head, live = tile_rows(spec, pl.program_id(0))
    first_query = tile_first[tile]
    query += first_query
    live &= (query < num_queries) & is_tile
    line = (starts[row] + query) * spec.num_heads + head
    queries = load(
        q.at[line[:, None], spec.columns], mask=spec.within(live), other=jnp.zeros((), q.dtype)
    )
    tile_queries = spec.query_rows // spec.tile_heads
    end = past + jnp.minimum(first_query + tile_queries, num_queries)
    start, first = jnp.int32(0), None
    if spec.sliding_window is not None:
        start = jnp.maximum(past + first_query - spec.sliding_window + 1, 0)
        first = past + query - spec.sliding_window + 1
    state = attend(
        queries,
        PoolRefs(tables, *pool),
        spec,
        table_row=jnp.minimum(row, num_rows - 1),
        kv_head=kv_head,
        start=start,
        end=jnp.where(is_tile, end, 0),
        first=first,
        last=past + query,
    )
    line = jnp.where(live, line, NOWHERE)
    result = state.normalised().astype(out.dtype)
    store(out.at[line[:, None], spec.columns], result, mask=spec.within(live))
    store(lse.at[line], state.log_sum_exp(), mask=live)
