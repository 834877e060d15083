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
from pallas_kernels._compat import local_target
from pallas_kernels._split import Units, attend_units
from pallas_kernels.config import Tuning, choose, num_partitions
from pallas_kernels.merge import merge_partials


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

    group_rows int32 [G, R]: the rows of each group, no row twice; B for none, behind the rows.
    prefix_lens int32 [G]: tokens that the group shares, at most the context of each of its rows;
    0 for an empty group. They are read through the table of the group's first row. Rows in no
    group are plain decode rows. `tunings`: of the prefix and of the tails.
    """
    _arguments.check(
        q,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        block_tables=block_tables,
        lengths=(context_lens, group_rows, prefix_lens),
        sliding_window=sliding_window,
    )
    if tunings is None:
        prefix, tail = (
            choose(
                kind,
                dtype=q.dtype.name,
                kv_dtype=k_pool.dtype.name,
                head_dim=q.shape[2],
                group=q.shape[1] // k_pool.shape[2],
                target=local_target(),
            )
            for kind in ("shared_prefix", "decode")
        )
        tunings = (prefix, tail)
    out, lse = _decode(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        group_rows,
        prefix_lens,
        k_scales,
        v_scales,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        tunings=tunings,
        num_multiprocessors=local_target().num_multiprocessors,
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


@partial(
    jax.jit,
    static_argnames=(
        "scale",
        "sliding_window",
        "soft_cap",
        "tunings",
        "num_multiprocessors",
        "interpret",
    ),
)
def _decode(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    context_lens: Array,
    group_rows: Array,
    prefix_lens: Array,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tunings: tuple[Tuning, Tuning],
    num_multiprocessors: int,
    interpret: bool | None,
) -> tuple[Array, Array]:
    pools = _arguments.flatten(k_pool, v_pool, k_scales, v_scales)
    group = q.shape[1] // k_pool.shape[2]
    firsts = None
    if sliding_window is not None:
        firsts = jnp.maximum(context_lens - sliding_window, 0)
    prefixes, tails = _units(block_tables, context_lens, group_rows, prefix_lens, firsts)
    results = []
    for name, units, tuning in (
        ("shared_prefix", prefixes, tunings[0]),
        ("paged_decode", tails, tunings[1]),
    ):
        members = 1 if units.members is None else group_rows.shape[1]
        spec = _arguments.make_spec(
            q,
            k_pool,
            block_tables,
            tuning,
            most_rows=members * group,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        tile_members = spec.query_rows // spec.tile_heads
        tiles = spec.num_kv_heads * spec.tiles_per_head * -(-members // tile_members)
        partitions = num_partitions(
            programs=units.tables.shape[0] * tiles,
            capacity_tokens=spec.table_width * spec.block_size,
            tuning=tuning,
            num_multiprocessors=num_multiprocessors,
        )
        result = attend_units(
            q,
            pools,
            units,
            spec,
            tuning,
            num_partitions=partitions,
            out_dtype=jnp.float32,
            name=name,
            interpret=interpret,
        )
        results.append(result)
    outs, lses = zip(*results, strict=True)
    out, lse = merge_partials(outs, lses)
    return out.astype(q.dtype), lse


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
