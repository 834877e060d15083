"""Decode attention of rows that share their first blocks: those are read once for all of them.

    group_rows  [[0, 2, 4],  prefix_lens [8,   rows 0 and 2 share their first 8 tokens,
                 [1, 3, 4]]               4]   rows 1 and 3 their first 4; B = 4 is no row

The queries of a group are stacked into one tile against the prefix, every row then attends to its
own tail, and the two are merged by log-sum-exp (as in Hydragen, Juravsky et al. 2024).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import _arguments
from pallas_kernels._arguments import Scoring
from pallas_kernels._compat import local_target, own_constants
from pallas_kernels._split import Units, attend_units
from pallas_kernels.config import Tuning, num_partitions
from pallas_kernels.merge import merge_partials
from pallas_kernels.write import KVPool


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
    tunings: tuple[Tuning, Tuning] | None = None,
    interpret: bool | None = None,
) -> Array | tuple[Array, Array]:
    """What `paged_decode_attention` gives, with shared leading blocks read once a group.

    group_rows int32 [G, R]: the rows of each group, no row twice, padded behind with B.
    prefix_lens int32 [G]: tokens that the group shares, at most the context of each of its rows;
    0 for an empty group. They are read through the table of the group's first row. Rows in no
    group are plain decode rows. `tunings`: of the prefix and of the tails.
    """
    pool = KVPool(k_pool, v_pool, k_scales, v_scales)
    scoring = Scoring(scale, sliding_window, soft_cap)
    _arguments.check(q, pool, block_tables, (context_lens, group_rows, prefix_lens), scoring)
    if tunings is None:
        of_prefix = _arguments.choose_for("shared_prefix", q, pool)
        tunings = (of_prefix, _arguments.choose_for("decode", q, pool))
    out, lse = _decode(
        q,
        pool,
        block_tables,
        context_lens,
        group_rows,
        prefix_lens,
        scoring=scoring,
        tunings=tunings,
        num_multiprocessors=local_target().num_multiprocessors,
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnames=("scoring", "tunings", "num_multiprocessors", "interpret"))
def _decode(
    q: Array,
    pool: KVPool,
    block_tables: Array,
    context_lens: Array,
    group_rows: Array,
    prefix_lens: Array,
    *,
    scoring: Scoring,
    tunings: tuple[Tuning, Tuning],
    num_multiprocessors: int,
    interpret: bool | None,
) -> tuple[Array, Array]:
    firsts = None
    if scoring.sliding_window is not None:
        firsts = jnp.maximum(context_lens - scoring.sliding_window, 0)
    both = _units(block_tables, context_lens, group_rows, prefix_lens, firsts)
    results = [
        _attend(
            q,
            pool,
            units,
            scoring,
            tuning,
            num_multiprocessors=num_multiprocessors,
            name=name,
            interpret=interpret,
        )
        for name, units, tuning in zip(
            ("shared_prefix", "paged_decode"), both, tunings, strict=True
        )
    ]
    outs, lses = zip(*results, strict=True)
    out, lse = merge_partials(outs, lses)
    return out.astype(q.dtype), lse


def _attend(
    q: Array,
    pool: KVPool,
    units: Units,
    scoring: Scoring,
    tuning: Tuning,
    *,
    num_multiprocessors: int,
    name: str,
    interpret: bool | None,
) -> tuple[Array, Array]:
    """(out [B, N, H], log-sum-exp [B, N]) of the prefixes or of the tails, float32."""
    members = 1 if units.members is None else units.members.shape[1]
    group = q.shape[1] // pool.k.shape[2]
    spec = _arguments.make_spec(q, pool, units.tables, scoring, tuning, most_rows=members * group)
    tile_members = spec.query_rows // spec.tile_heads
    tiles = spec.num_kv_heads * spec.tiles_per_head * -(-members // tile_members)
    return attend_units(
        q,
        _arguments.flatten(pool),
        units,
        spec,
        tuning,
        num_partitions=num_partitions(
            programs=units.tables.shape[0] * tiles,
            capacity_tokens=spec.table_width * spec.block_size,
            tuning=tuning,
            num_multiprocessors=num_multiprocessors,
        ),
        out_dtype=jnp.dtype(jnp.float32),
        name=name,
        interpret=interpret,
    )


def _units(
    tables: Array, context_lens: Array, group_rows: Array, prefix_lens: Array, firsts: Array | None
) -> tuple[Units, Units]:
    """(the prefixes, the tails); `firsts` are the first tokens that rows see, None: all 0."""
    num_rows = context_lens.shape[0]
    is_row = group_rows < num_rows
    rows = jnp.minimum(group_rows, num_rows - 1)

    def of_rows(values: Array) -> Array:
        """A value [G] of each group as one of each row; 0 for rows in no group."""
        spread = jnp.broadcast_to(values[:, None], group_rows.shape)
        return jnp.zeros_like(context_lens).at[group_rows].set(spread, mode="drop")

    prefix_starts = jnp.zeros_like(prefix_lens)
    tail_starts = of_rows(prefix_lens)
    if firsts is not None:
        earliest = jnp.min(jnp.where(is_row, firsts[rows], prefix_lens[:, None]), axis=1)
        prefix_starts = jnp.minimum(earliest, prefix_lens)
        tail_starts = jnp.maximum(tail_starts, firsts)
    prefixes = Units(
        tables[rows[:, 0]],
        prefix_starts,
        prefix_lens,
        of_rows(prefix_lens - prefix_starts),
        group_rows,
        firsts,
    )
    return prefixes, Units(tables, tail_starts, context_lens, context_lens - tail_starts)
