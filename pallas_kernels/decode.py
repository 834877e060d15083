"""Paged decode attention: one query a row against all tokens of the row's blocks."""

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
from pallas_kernels.write import KVPool


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
    tuning: Tuning | None = None,
    interpret: bool | None = None,
) -> Array | tuple[Array, Array]:
    """Attention [B, N, H] of one query a row, in q's dtype; float32 inside.

    q [B, N, H]: the query of each row's last token, whose K and V are in the pool already.
    k_pool, v_pool [P, S, K, H], N a multiple of K. block_tables int32 [B, M]: each row's block ids
    in the order of its tokens. context_lens int32 [B]: how many tokens a row has, at most M * S; 0
    gives exactly 0. Entries and slots beyond those tokens may hold anything.

    A query sees the last `sliding_window` tokens; scores are soft_cap * tanh(score / soft_cap).
    int8 and float8_e4m3fn pools come with `k_scales` and `v_scales` float32 [P, S, K].
    `return_lse`: also the natural log-sum-exp of the scores, float32 [B, N], -inf for no token.
    `interpret` None: compiled on NVIDIA GPUs, interpreted elsewhere; to be interpreted under
    shard_map, it takes `check_vma=False`. ValueError for arrays that do not fit together.
    """
    pool = KVPool(k_pool, v_pool, k_scales, v_scales)
    scoring = Scoring(scale, sliding_window, soft_cap)
    _arguments.check(q, pool, block_tables, (context_lens,), scoring)
    out, lse = _decode(
        q,
        pool,
        block_tables,
        context_lens,
        scoring=scoring,
        tuning=tuning or _arguments.choose_for("decode", q, pool),
        num_multiprocessors=local_target().num_multiprocessors,
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnames=("scoring", "tuning", "num_multiprocessors", "interpret"))
def _decode(
    q: Array,
    pool: KVPool,
    block_tables: Array,
    context_lens: Array,
    *,
    scoring: Scoring,
    tuning: Tuning,
    num_multiprocessors: int,
    interpret: bool | None,
) -> tuple[Array, Array]:
    group = q.shape[1] // pool.k.shape[2]
    spec = _arguments.make_spec(q, pool, block_tables, scoring, tuning, most_rows=group)
    capacity = spec.table_width * spec.block_size
    starts = jnp.zeros_like(context_lens)
    if scoring.sliding_window is not None:
        capacity = min(capacity, scoring.sliding_window)
        starts = jnp.maximum(context_lens - scoring.sliding_window, 0)
    return attend_units(
        q,
        _arguments.flatten(pool),
        Units(block_tables, starts, context_lens, context_lens - starts),
        spec,
        tuning,
        num_partitions=num_partitions(
            programs=q.shape[0] * spec.num_kv_heads * spec.tiles_per_head,
            capacity_tokens=capacity,
            tuning=tuning,
            num_multiprocessors=num_multiprocessors,
        ),
        out_dtype=q.dtype,
        name="paged_decode",
        interpret=interpret,
    )
