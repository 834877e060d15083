"""Attention split over the KV length: each program of the kernel takes one part of a unit's tokens.

A unit is a range of one table's tokens and the rows whose queries attend to it: one row in plain
decode, all rows that share a prefix in shared-prefix decode. All parts have the same size, which
follows from the longest unit, so that a ragged batch is balanced; programs beyond a unit's end do
nothing. A second kernel merges the parts, and reads those that have tokens (Flash-Decoding, Dao et
al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._arguments import FlatPool
from pallas_kernels._compat import call, load, store
from pallas_kernels._tiles import (
    LOWEST,
    NOWHERE,
    PoolRefs,
    Spec,
    attend,
    log_sum_exp,
    power_of_two,
    tile_rows,
)
from pallas_kernels.config import Tuning

MERGED_AT_ONCE = 16
"""Parts that the merging kernel reads at a time."""


class Units(NamedTuple):
    """U ranges of tokens, and the rows of q that attend to each; all int32."""

    tables: Array  # [U, M] block ids
    starts: Array  # [U]
    ends: Array  # [U] the unit is tokens starts .. ends - 1
    row_lengths: Array  # [B] tokens of the row's unit; 0 for a row in no unit
    members: Array | None = None  # [U, R] rows of each unit, padded with B; None: unit u is row u
    firsts: Array | None = None  # [B] first token that the row's query sees; None: it sees all


def attend_units(
    q: Array,
    pool: FlatPool,
    units: Units,
    spec: Spec,
    tuning: Tuning,
    *,
    num_partitions: int,
    out_dtype: jnp.dtype,
    name: str,
    interpret: bool | None,
) -> tuple[Array, Array]:
    """(out [B, N, H], natural log-sum-exp float32 [B, N]); 0 and -inf for rows in no unit.

    q [B, N, H]. `num_partitions`: the most parts that the longest unit is cut into.
    """
    num_rows, num_heads, _ = q.shape
    is_whole = num_partitions == 1 and units.members is None  # nothing to merge
    part = -(-jnp.max(units.ends - units.starts) // num_partitions)
    part = jnp.maximum(-(-part // spec.block_k) * spec.block_k, tuning.partition_tokens)
    part = part.reshape(1)
    parts = _attend_parts(
        q,
        pool,
        units,
        part,
        spec=spec,
        num_partitions=num_partitions,
        out_dtype=out_dtype if is_whole else jnp.dtype(jnp.float32),
        name=name,
        tuning=tuning,
        interpret=interpret,
    )
    if is_whole:
        out, largest, weight_sum = parts
        return out.reshape(q.shape), log_sum_exp(largest, weight_sum).reshape(num_rows, num_heads)
    merged, lse = call(
        partial(_merge_parts, num_partitions=num_partitions, head_dim=spec.head_dim),
        *(*parts, units.row_lengths, part),
        name=f"{name}_merge",
        grid=(num_heads, num_rows),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows * num_heads, spec.head_dim), out_dtype),
            jax.ShapeDtypeStruct((num_rows * num_heads,), jnp.float32),
        ],
        tuning=replace(tuning, num_warps=1, num_stages=1),
        interpret=interpret,
    )
    return merged.reshape(q.shape), lse.reshape(num_rows, num_heads)


def _attend_parts(
    q: Array,
    pool: FlatPool,
    units: Units,
    part: Array,
    *,
    spec: Spec,
    num_partitions: int,
    out_dtype: jnp.dtype,
    name: str,
    tuning: Tuning,
    interpret: bool | None,
) -> list[Array]:
    """The first kernel's outputs: out [B * parts * N, H], and the softmax's max and sum
    [B * parts * N]. `part` int32 [1]: tokens of a part."""
    num_rows, num_heads, head_dim = q.shape
    lines = num_rows * num_partitions * num_heads
    optional = [array.reshape(-1) for array in (units.members, units.firsts) if array is not None]
    kernel = _Part.of(units, spec, num_rows)
    num_units = units.tables.shape[0]
    grid = (
        spec.num_kv_heads * spec.tiles_per_head,
        num_partitions,
        num_units * kernel.member_tiles,
    )
    inputs = (q.reshape(-1, head_dim), units.starts, units.ends, part, *optional)
    return call(
        kernel,
        *(*inputs, units.tables.reshape(-1), *pool.arrays()),
        name=name,
        grid=grid,
        out_shape=[
            jax.ShapeDtypeStruct((lines, head_dim), out_dtype),
            jax.ShapeDtypeStruct((lines,), jnp.float32),
            jax.ShapeDtypeStruct((lines,), jnp.float32),
        ],
        tuning=tuning,
        interpret=interpret,
    )


@dataclass(frozen=True)
class _Part:
    """The kernel: one tile of queries against one part of one unit.

    Grid: (query tiles of all KV heads, parts, units times tiles of members). Refs: q [B * N, H],
    starts and ends [U], part [1], members [U * R] and firsts [B] where there are any, the tables
    [U * M] and the pool; outputs out [B * parts * N, H] and the softmax's max and sum
    [B * parts * N].
    """

    spec: Spec
    num_rows: int
    most_members: int
    has_members: bool
    has_firsts: bool

    @classmethod
    def of(cls, units: Units, spec: Spec, num_rows: int) -> _Part:
        return cls(
            spec=spec,
            num_rows=num_rows,
            most_members=1 if units.members is None else units.members.shape[1],
            has_members=units.members is not None,
            has_firsts=units.firsts is not None,
        )

    @property
    def tile_members(self) -> int:
        return self.spec.query_rows // self.spec.tile_heads

    @property
    def member_tiles(self) -> int:
        """Query tiles that one unit's members take."""
        return -(-self.most_members // self.tile_members)

    def __call__(self, q: Any, starts: Any, ends: Any, part: Any, *refs: Any) -> None:
        *inputs, out, maxima, sums = refs
        members = inputs.pop(0) if self.has_members else None
        firsts = inputs.pop(0) if self.has_firsts else None
        pool, spec = PoolRefs(*inputs), self.spec
        unit = pl.program_id(2) // self.member_tiles
        kv_head, member, head, live = tile_rows(spec, pl.program_id(0))
        row, live = self._rows(members, unit, member, live)
        line = row * spec.num_heads + head
        queries = load(
            q.at[line[:, None], spec.columns], mask=spec.within(live), other=jnp.zeros((), q.dtype)
        )
        start, end = starts[unit] + pl.program_id(1) * part[0], ends[unit]
        if members is not None:  # a tile of padding reads nothing
            end = jnp.where(jnp.max(live.astype(jnp.int32), axis=0) > 0, end, 0)
        state = attend(
            queries,
            pool,
            spec,
            table_row=unit,
            kv_head=kv_head,
            start=start,
            end=jnp.minimum(end, start + part[0]),
            first=None if firsts is None else load(firsts.at[row], mask=live, other=0),
        )
        line = (row * pl.num_programs(1) + pl.program_id(1)) * spec.num_heads + head
        line = jnp.where(live, line, NOWHERE)
        result = state.normalised().astype(out.dtype)
        store(out.at[line[:, None], spec.columns], result, mask=spec.within(live))
        store(maxima.at[line], state.max, mask=live)
        store(sums.at[line], state.sum, mask=live)

    def _rows(self, members: Any, unit: Array, member: Array, live: Array) -> tuple[Array, Array]:
        """(row of q [tile], whether there is one [tile]) of each row of the query tile."""
        if members is None:
            return jnp.full_like(member, unit), live & (member == 0)
        member += pl.program_id(2) % self.member_tiles * self.tile_members
        live &= member < self.most_members
        row = load(members.at[unit * self.most_members + member], mask=live, other=self.num_rows)
        return row, live & (row < self.num_rows)


def _merge_parts(*refs: Any, num_partitions: int, head_dim: int) -> None:
    """The merging kernel: the parts of one row and head that have tokens. Grid: (heads, rows).

    Refs: out, max and sum of the parts, row_lengths [B], part [1]; outputs out [B * N, H] and
    natural log-sum-exp [B * N].
    """
    parts, maxima, sums, lengths, part, out, lse = refs
    head, row, num_heads = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    columns = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)
    is_column = columns < head_dim
    num_live = lax.div(lengths[row] + part[0] - 1, part[0])

    def add(turn: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, largest, weight_sum = state
        index = turn * MERGED_AT_ONCE + jnp.arange(MERGED_AT_ONCE, dtype=jnp.int32)
        live = index < num_live
        line = (row * num_partitions + index) * num_heads + head
        part_maxima = load(maxima.at[line], mask=live, other=LOWEST)
        part_sums = load(sums.at[line], mask=live, other=0.0)
        values = load(
            parts.at[line[:, None], columns[None, :]],
            mask=live[:, None] & is_column[None, :],
            other=0.0,
        )
        new_largest = jnp.maximum(largest, part_maxima.max(axis=0))
        weights = jnp.exp2(part_maxima - new_largest) * part_sums
        rescale = jnp.exp2(largest - new_largest)
        acc = acc * rescale + (values * weights[:, None]).sum(axis=0)
        return acc, new_largest, weight_sum * rescale + weights.sum(axis=0)

    acc = jnp.zeros(columns.shape, jnp.float32)
    turns = lax.div(num_live + (MERGED_AT_ONCE - 1), jnp.int32(MERGED_AT_ONCE))
    acc, largest, weight_sum = lax.fori_loop(
        jnp.int32(0), turns, add, (acc, jnp.float32(LOWEST), jnp.float32(0))
    )
    line = row * num_heads + head
    result = acc / jnp.where(weight_sum > 0, weight_sum, 1)
    store(out.at[jnp.full_like(columns, line), columns], result.astype(out.dtype), mask=is_column)
    lse[line] = log_sum_exp(largest, weight_sum)
