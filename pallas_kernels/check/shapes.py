"""The attention calls that are compiled: the kernels at the shapes of known models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    paged_decode_attention,
    paged_prefill_attention,
    shared_prefix_decode_attention,
    write_kv,
)
from pallas_kernels._tiles import power_of_two
from pallas_kernels.check.cards import Card
from pallas_kernels.check.program import Inner, Program
from pallas_kernels.config import Kind, Tuning, choose

BLOCK_SIZE = 16
INT32 = jnp.int32
FEW_WARPS = 0.12
"""Occupancy that suffices where tiles of many queries keep a matrix unit busy from registers; what
more warps cost there is tabulated in docs/decisions/0007."""
MOST_WARPS = 64
"""Warps that a large card's multiprocessor holds."""
SHARERS = 8
"""Rows of a group that share a prefix."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention depends on of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype in ("int8", "float8_e4m3fn")

    def tuning(self, kind: Kind, card: Card) -> Tuning:
        """The tuning that `pallas_kernels.config` has for this card."""
        return choose(
            kind,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            head_dim=self.head_dim,
            group=self.group,
            target=card.target,
        )

    def token_bytes(self) -> int:
        """Bytes of K and V of one token, without scales."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.kv_dtype).itemsize


MODELS = (
    Heads("7b", 32, 32, 128),
    Heads("8b", 32, 8, 128),
    Heads("13b", 40, 40, 128),
    Heads("smollm2", 9, 3, 64),
)
VARIANTS = (
    Heads("8b-int8", 32, 8, 128, kv_dtype="int8"),
    Heads("8b-float8", 32, 8, 128, kv_dtype="float8_e4m3fn"),
    Heads("8b-float16", 32, 8, 128, "float16", "float16"),
    Heads("8b-float32", 32, 8, 128, "float32", "float32"),
    Heads("d80", 32, 32, 80),
    Heads("d96", 32, 32, 96),
    Heads("d256", 16, 8, 256),
    Heads("mqa71", 71, 1, 64),
)


def kernel_programs(card: Card) -> list[Program]:
    """Each kernel at each shape."""
    makers = (decode, prefill, shared_prefix)
    programs = [make(heads, card) for heads in MODELS + VARIANTS for make in makers]
    return programs + [write(heads) for heads in (MODELS[0], VARIANTS[0])]


def decode(
    heads: Heads, card: Card, *, rows: int = 32, tokens: int = 2048, tuning: Tuning | None = None
) -> Program:
    """One decode call: `rows` rows of `tokens` tokens each."""
    tuning = tuning or heads.tuning("decode", card)
    width = tokens // BLOCK_SIZE
    call = _with_scales(paged_decode_attention, heads, 5, tuning=tuning)
    return Program(
        f"decode {heads.name}",
        call,
        (
            _shape((rows, heads.num_heads, heads.head_dim), heads.dtype),
            *_pools(heads, rows * width + 1),
            _shape((rows, width), INT32),
            _shape((rows,), INT32),
            *_scales(heads, rows * width + 1),
        ),
        kernels={
            "paged_decode": _inner(
                heads, tuning, tiles=rows * _query_tiles(heads, tuning), tokens=tokens, queries=rows
            )
        },
        pools=_pools(heads, rows * width + 1),
    )


def prefill(
    heads: Heads, card: Card, *, tokens: int = 2048, tuning: Tuning | None = None
) -> Program:
    """One prefill call: a single row of `tokens` tokens, nothing cached."""
    tuning = tuning or heads.tuning("prefill", card)
    width = tokens // BLOCK_SIZE
    call = _with_scales(paged_prefill_attention, heads, 6, tuning=tuning)
    per_tile = max(1, tuning.query_rows // heads.group)
    tiles = -(-tokens // per_tile) * _query_tiles(heads, tuning)
    inner = _inner(heads, tuning, tiles=tiles, tokens=tokens // 2, queries=tokens)
    is_large = power_of_two(heads.head_dim) > 64 and card.most_warps == MOST_WARPS
    return Program(
        f"prefill {heads.name}",
        call,
        (
            _shape((tokens, heads.num_heads, heads.head_dim), heads.dtype),
            *_pools(heads, width + 1),
            _shape((1, width), INT32),
            _shape((1,), INT32),
            _shape((2,), INT32),
            *_scales(heads, width + 1),
        ),
        kernels={
            "paged_prefill": replace(
                inner,
                kv_bytes=tokens * heads.token_bytes(),
                min_occupancy=FEW_WARPS if is_large else inner.min_occupancy,
            )
        },
        pools=_pools(heads, width + 1),
    )


def shared_prefix(heads: Heads, card: Card, *, rows: int = 32, tokens: int = 2048) -> Program:
    """One call of shared-prefix decode: SHARERS rows at a time share half of their tokens."""
    tunings = (heads.tuning("shared_prefix", card), heads.tuning("decode", card))
    width = tokens // BLOCK_SIZE
    groups, half = rows // SHARERS, tokens // 2
    tiles = -(-SHARERS * heads.group // power_of_two(tunings[0].query_rows))
    call = _with_scales(shared_prefix_decode_attention, heads, 7, tunings=tunings)
    return Program(
        f"shared prefix {heads.name}",
        call,
        (
            _shape((rows, heads.num_heads, heads.head_dim), heads.dtype),
            *_pools(heads, rows * width + 1),
            _shape((rows, width), INT32),
            _shape((rows,), INT32),
            _shape((groups, SHARERS), INT32),
            _shape((groups,), INT32),
            *_scales(heads, rows * width + 1),
        ),
        kernels={
            "shared_prefix": replace(
                _inner(heads, tunings[0], tiles=groups * tiles, tokens=half, queries=rows),
                kv_bytes=groups * half * heads.token_bytes(),
            ),
            "paged_decode": _inner(
                heads,
                tunings[1],
                tiles=rows * _query_tiles(heads, tunings[1]),
                tokens=half,
                queries=rows,
            ),
        },
        pools=_pools(heads, rows * width + 1),
    )


def write(heads: Heads, *, rows: int = 32, num_blocks: int = 4096) -> Program:
    """One write of a decode step's tokens into donated pools."""
    token = _shape((rows, heads.num_kv_heads, heads.head_dim), heads.dtype)

    def call(k_pool: Any, v_pool: Any, k: Any, v: Any, slots: Any, *scales: Any) -> Any:
        named = dict(zip(("k_scales", "v_scales"), scales, strict=bool(scales)))
        return write_kv(k_pool, v_pool, k, v, slots, **named)

    pools, scales = _pools(heads, num_blocks), _scales(heads, num_blocks)
    donated = (0, 1, *range(5, 5 + len(scales)))
    return Program(
        f"write {heads.name}",
        call,
        (*pools, token, token, _shape((rows,), INT32), *scales),
        donated=donated,
        pools=pools,
    )


def _inner(heads: Heads, tuning: Tuning, *, tiles: int, tokens: int, queries: int) -> Inner:
    """What is expected of a kernel: `tiles` query tiles a KV head read `tokens` tokens each.

    `queries`: tokens with a query, in the whole call.
    """
    width = power_of_two(heads.head_dim)
    block_k = power_of_two(tuning.block_k)
    is_exact = heads.dtype == "float32"
    return Inner(
        tile_bytes=2 * block_k * width * jnp.dtype(heads.kv_dtype).itemsize,
        turns=tiles * heads.num_kv_heads * -(-tokens // block_k),
        kv_bytes=queries * tokens * heads.token_bytes(),
        operations=4 * queries * tokens * heads.num_heads * heads.head_dim,
        num_stages=tuning.num_stages,
        is_quantised=heads.is_quantised,
        needs_tensor_cores=not is_exact,
        min_occupancy=FEW_WARPS if is_exact or heads.is_quantised or width > 128 else 0.25,
    )


def _query_tiles(heads: Heads, tuning: Tuning) -> int:
    """Tiles that one query's heads of one KV head take."""
    return -(-heads.group // power_of_two(tuning.query_rows))


def _with_scales(function: Callable[..., Any], heads: Heads, count: int, **fixed: Any) -> Any:
    """The call with K's and V's scales, if any, behind its first `count` arrays."""
    scale = heads.head_dim**-0.5
    named = partial(function, scale=scale, interpret=False, **fixed)

    def call(*arrays: Any) -> Any:
        if not heads.is_quantised:
            return named(*arrays)
        return named(*arrays[:count], k_scales=arrays[count], v_scales=arrays[count + 1])

    return call


def _pools(heads: Heads, num_blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = (num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    return (_shape(shape, heads.kv_dtype),) * 2


def _scales(heads: Heads, num_blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    if not heads.is_quantised:
        return ()
    return (_shape((num_blocks, BLOCK_SIZE, heads.num_kv_heads), jnp.float32),) * 2


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
