"""Attention to leading blocks that several rows of a decode step share: read once for them all.

The queries of a group are stacked into tiles against the shared keys; each row then goes on with
its own keys from there (Hydragen, Juravsky et al. 2024, merges two softmaxes; an online one needs
no merging). The blocks are read through the table of the group's first row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
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
from jaxpage.device.types import LayerKV, StepInput

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK_TOKENS = 128
TILE_ROWS = 16
"""Rows whose queries are stacked; a group's last tile is padded to it."""


class _Tiles(NamedTuple):
    """The rows of all groups, cut into tiles.

    groups [[0, 1, 2], [3, 4, 5]], B = 5, tiles of 2: group 0 takes tiles 0 and 1, group 1 tile 2.
    """

    rows: Array  # [G, R + tile] the groups' rows; B: none
    counts: Array  # [G] tiles of each group
    ends: Array  # [G] the first tile after those of each group


def attend_prefixes(
    q: Float[Array, "B N H"], layer_kv: LayerKV, step: StepInput, *, spec: AttentionSpec
) -> tuple[Int[Array, "B"], Softmax | None]:
    """(the position each row's own keys begin at, the softmax of those before) of a decode step.

    The softmax is [B, K, N / K, ...]; None where the step has no groups. `q` is float32, scaled.
    """
    num_rows, num_heads, head_dim = q.shape
    if step.group_rows is None or step.prefix_lens is None:
        return jnp.zeros(num_rows, jnp.int32), None
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    blocks = chunk_blocks(CHUNK_TOKENS, block_size, step.block_tables.shape[1])
    tables = whole_chunks(step.block_tables, blocks)
    tile = min(TILE_ROWS, num_rows)
    tiles = _cut(step.group_rows, step.prefix_lens, num_rows, tile)

    def add_tile(index: Array | int, state: Softmax) -> Softmax:
        group = jnp.searchsorted(tiles.ends, index, side="right").astype(jnp.int32)
        skipped = (index - tiles.ends[group] + tiles.counts[group]) * tile
        rows = lax.dynamic_slice(tiles.rows, (group, skipped), (1, tile))[0]
        position = step.context_lens.at[rows].get(mode="fill", fill_value=2**30) - 1
        starts = first_seen(position, spec.window)  # beyond the end for padding
        queries = q.at[rows].get(mode="fill", fill_value=0)
        queries = queries.reshape(tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        table, end = tables[tiles.rows[group, 0]], step.prefix_lens[group]
        part = _attend_tile(
            queries, layer_kv, table, starts, end, blocks=blocks, soft_cap=spec.soft_cap
        )
        largest, total, acc = (jnp.moveaxis(leaf, 2, 0) for leaf in part)
        return Softmax(
            state.max.at[rows].set(largest, mode="drop"),
            state.sum.at[rows].set(total, mode="drop"),
            state.acc.at[rows].set(acc, mode="drop"),
        )

    none = Softmax.empty(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim, like=q)
    shared = lax.fori_loop(jnp.int32(0), tiles.ends[-1], add_tile, none)
    lens = jnp.broadcast_to(step.prefix_lens[:, None], step.group_rows.shape)
    begin = jnp.zeros(num_rows, jnp.int32).at[step.group_rows].set(lens, mode="drop")
    return begin, shared


def _cut(group_rows: Array, prefix_lens: Array, num_rows: int, tile: int) -> _Tiles:
    padded = jnp.pad(group_rows, ((0, 0), (0, tile)), constant_values=num_rows)
    counts = (group_rows < num_rows).sum(1, dtype=jnp.int32)
    counts = jnp.where(prefix_lens > 0, (counts + tile - 1) // tile, 0)
    return _Tiles(padded, counts, jnp.cumsum(counts, dtype=jnp.int32))


def _attend_tile(
    queries: Array,
    layer_kv: LayerKV,
    table: Array,
    starts: Array,
    end: Array,
    *,
    blocks: int,
    soft_cap: float | None,
) -> Softmax:
    """The softmax of queries [K, N / K, tile, H] that see tokens starts[i] .. end - 1 of a table
    [M]."""
    size = blocks * layer_kv.k.shape[1]

    def add_chunk(chunk: Array | int, part: Softmax) -> Softmax:
        ids = lax.dynamic_slice(table, (chunk * blocks,), (blocks,))
        key = chunk * size + jnp.arange(size, dtype=jnp.int32)
        live = (key < end) & (key >= starts.min())
        k, v = heads_first(*gather(layer_kv, ids, live), 1)  # [K, size, H]
        seen = live[None] & (key[None] >= starts[:, None])
        scores = jnp.einsum("kgth,ksh->kgts", queries, k, precision=EXACT)
        return part.add(capped(scores, soft_cap), seen[None, None], "kgts,ksh->kgth", v)

    part = Softmax.empty(*queries.shape, like=queries)
    return lax.fori_loop(starts.min() // size, (end + size - 1) // size, add_chunk, part)
