"""What all attention kernels share: a tile of queries against a range of one row's tokens.

    pool [P, S, K, H] seen as rows of H numbers; block table (5, 2), S = 4, K = 2, KV head 1
    token   0    1    2    3    4    5          its block is table[token // 4]
    row    41   43   45   47   17   19          (block * 4 + token % 4) * 2 + 1

A tile of tokens may cross the borders of blocks, so any block size works. Tiles are powers of two:
what is beyond a row's live tokens, a group's heads or a head's numbers is masked. The softmax is
FlashAttention's (Dao et al. 2022, algorithm 1) in base 2, and float32 whatever the pool holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import load

MASKED = -1e30
"""The score of a masked key: finite, because -inf minus -inf would be NaN."""
LOWEST = MASKED / 2
"""The largest score of no keys: so far above MASKED that masked keys weigh exactly 0 beside it."""
NOWHERE = 2**30
"""The index that masked rows of a tile are stored at. Interpret mode stores a masked row's old
value at its index, and so would undo what a live row stored there; beyond the array it stores
nothing."""
LOG2_E = math.log2(math.e)
SMALLEST_TILE = 16
"""The fewest rows, and columns, that a matrix instruction takes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a kernel is compiled for."""

    block_size: int
    """Tokens of a block."""
    table_width: int
    """Blocks of a table."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_k: int
    """Tokens of a tile of K and V, a power of two."""
    query_rows: int
    """Rows of the query tile, one for each query and head; a power of two."""
    tile_heads: int
    """Query heads of one tile; a larger group takes several tiles."""
    scale: float
    sliding_window: int | None
    """How many tokens a query sees, its own included."""
    soft_cap: float | None
    is_float8: bool
    """The pool arrives as uint8 and holds float8_e4m3fn."""

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tiles_per_head(self) -> int:
        """Query tiles that one KV head's group takes."""
        return -(-self.group // self.tile_heads)

    @property
    def width(self) -> int:
        """Columns of a tile: the head dim, padded to a power of two."""
        return power_of_two(self.head_dim)

    @property
    def columns(self) -> Array:
        """Indices of a tile's columns: int32 [1, width]."""
        return jnp.arange(self.width, dtype=jnp.int32)[None, :]

    def within(self, rows: Array) -> Array:
        """Mask of a tile's numbers, [R, 1] or [R, width], given that of its rows [R]."""
        mask = rows[:, None]
        return mask if self.width == self.head_dim else mask & (self.columns < self.head_dim)


class PoolRefs(NamedTuple):
    """A layer's pool and the block tables, as references inside a kernel."""

    tables: Any  # int32 [B * M]
    k: Any  # [P * S * K, H]
    v: Any  # [P * S * K, H]
    k_scales: Any = None  # float32 [P * S * K]
    v_scales: Any = None  # float32 [P * S * K]


class Softmax(NamedTuple):
    """The online softmax of a tile of queries, in base 2; float32."""

    acc: Array  # [R, width] weighted sums of V
    max: Array  # [R] largest scores so far, times log2(e)
    sum: Array  # [R] sums of weights, 2 ** (score - max)

    @classmethod
    def empty(cls, rows: int, width: int) -> Softmax:
        """The softmax of no keys."""
        return cls(
            jnp.zeros((rows, width), jnp.float32),
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )

    def normalised(self) -> Array:
        """acc / sum [R, width]; exactly 0 where no key was seen."""
        return (
            self.acc * jnp.where(self.sum > 0, 1 / jnp.where(self.sum > 0, self.sum, 1), 0)[:, None]
        )

    def log_sum_exp(self) -> Array:
        """Natural log-sum-exp of the scores [R]; -inf where no key was seen."""
        return log_sum_exp(self.max, self.sum)


def log_sum_exp(largest: Array, weight_sum: Array) -> Array:
    """The natural log-sum-exp of a softmax in base 2; -inf where no key was seen."""
    log = jnp.log2(jnp.where(weight_sum > 0, weight_sum, 1))
    return jnp.where(weight_sum > 0, (largest + log) * (1 / LOG2_E), -jnp.inf)


def tile_rows(spec: Spec, tile: Array) -> tuple[Array, Array, Array, Array]:
    """(KV head, query of the tile [R], query head [R], whether the row is used [R]).

    `tile` counts the tiles of all KV heads, one head after the other. The rows of one tile:

        group 3, query_rows 16   row    0  1  2  3  4  5 ... 14  15
                                 query  0  0  0  1  1  1      4   -
                                 head   0  1  2  0  1  2      2   -
    """
    heads, per_head = spec.tile_heads, spec.tiles_per_head
    row = jnp.arange(spec.query_rows, dtype=jnp.int32)
    kv_head = tile // per_head
    head = tile % per_head * heads + row % heads
    is_row = (head < spec.group) & (row < spec.query_rows // heads * heads)
    return kv_head, row // heads, kv_head * spec.group + head, is_row


def attend(
    q: Array,
    pool: PoolRefs,
    spec: Spec,
    *,
    table_row: Array,
    kv_head: Array,
    start: Array,
    end: Array,
    first: Array | None = None,
    last: Array | None = None,
) -> Softmax:
    """The softmax of queries [R, width] over tokens start .. end - 1 of one row's table.

    Query r sees tokens first[r] .. last[r] of those; None: no such limit.
    """

    def add_tile(index: Array, state: Softmax) -> Softmax:
        token = start + index * spec.block_k + jnp.arange(spec.block_k, dtype=jnp.int32)
        live = token < end
        pool_row = _pool_rows(pool, spec, table_row, kv_head, token, live)
        k, v = (_load_rows(ref, spec, pool_row, live, q.dtype) for ref in (pool.k, pool.v))
        scores = _product(q, k, 1) * spec.scale
        if pool.k_scales is not None:
            scores *= load(pool.k_scales.at[pool_row], mask=live, other=0.0)[None, :]
        if spec.soft_cap is not None:
            scores = jnp.tanh(scores * (1 / spec.soft_cap)) * spec.soft_cap
        scores = jnp.where(_seen(token, live, first, last), scores * LOG2_E, MASKED)
        largest = jnp.maximum(state.max, scores.max(axis=1))
        weights = jnp.exp2(scores - largest[:, None])
        rescale = jnp.exp2(state.max - largest)
        weight_sum = state.sum * rescale + weights.sum(axis=1)
        if pool.v_scales is not None:
            weights *= load(pool.v_scales.at[pool_row], mask=live, other=0.0)[None, :]
        added = _product(weights.astype(v.dtype), v, 0)
        return Softmax(state.acc * rescale[:, None] + added, largest, weight_sum)

    num_tiles = lax.div(jnp.maximum(end - start, 0) + (spec.block_k - 1), jnp.int32(spec.block_k))
    return lax.fori_loop(jnp.int32(0), num_tiles, add_tile, Softmax.empty(q.shape[0], spec.width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and SMALLEST_TILE."""
    return max(SMALLEST_TILE, 1 << (number - 1).bit_length())


def _seen(token: Array, live: Array, first: Array | None, last: Array | None) -> Array:
    """Which tokens of the tile each query sees: [1 or R, block_k]."""
    seen = live[None, :]
    if first is not None:
        seen &= token[None, :] >= first[:, None]
    if last is not None:
        seen &= token[None, :] <= last[:, None]
    return seen


def _pool_rows(
    pool: PoolRefs, spec: Spec, table_row: Array, kv_head: Array, token: Array, live: Array
) -> Array:
    """The row of the flat pool [block_k] where each token of a tile lies; block 0's if not live."""
    size = jnp.full_like(token, spec.block_size)
    entry = table_row * spec.table_width + lax.div(token, size)
    block = load(pool.tables.at[entry], mask=live, other=0)
    return (block * spec.block_size + lax.rem(token, size)) * spec.num_kv_heads + kv_head


def _load_rows(ref: Any, spec: Spec, rows: Array, live: Array, dtype: jnp.dtype) -> Array:
    """K or V of a tile of tokens [block_k, width] in the queries' dtype; 0 where not live.

    V needs the 0 too: a weight of 0 times a stale NaN would be NaN.
    """
    zero = jnp.zeros((), ref.dtype)
    stored = load(ref.at[rows[:, None], spec.columns], mask=spec.within(live), other=zero)
    if not spec.is_float8:
        return stored.astype(dtype)
    # No card before Hopper converts float8_e4m3fn. Its bits put into a float16, s eeee mmm ->
    # s 0eeee mmm0000000, are the number divided by 2 ** 8, denormals included: the biases of the
    # exponents are 7 and 15.
    bits = stored.astype(jnp.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return (lax.bitcast_convert_type(bits, jnp.float16) * 256).astype(dtype)


def _product(a: Array, b: Array, contracted: int) -> Array:
    """a [R, X] times b over b's axis `contracted`, in float32.

    Float32 is multiplied exactly: by default a GPU would use TF32.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
