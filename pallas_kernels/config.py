"""How large a kernel's tiles are and how many parts a row has: the only place that knows cards.

The numbers were chosen from what the compiler reports (registers, spills, shared memory), not by
timing on a card; a kernel is right with any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "prefill", "shared_prefix"]


@dataclass(frozen=True, slots=True)
class Target:
    """The card that a kernel is made for."""

    arch: str = "sm_80"
    num_multiprocessors: int = 108


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shape of one kernel's programs. Tiles are powers of two of at least 16."""

    block_k: int
    """Tokens of K and V that one iteration of the loop reads."""
    query_rows: int
    """Rows of a query tile, one for each query and head; fewer where a call can't fill them."""
    partition_tokens: int
    """Fewest tokens that are worth a program of their own."""
    max_partition_tokens: int
    """Most tokens of a program, so that one long row does not outlast all others."""
    num_warps: int
    """Groups of 32 threads that run a program."""
    num_stages: int
    """Iterations of the loop whose reads are in flight at once."""


_SHAPES: dict[tuple[str, str, str], tuple[int, int, int, int]] = {
    # block_k, query_rows, num_warps, num_stages
    ("decode", "d128", "sm_80"): (64, 16, 4, 3),
    ("decode", "d128", "sm_90"): (64, 16, 4, 3),
    ("decode", "d256", "sm_80"): (32, 16, 8, 2),
    ("decode", "d256", "sm_90"): (32, 16, 4, 2),
    ("decode", "float32", "sm_80"): (16, 16, 4, 3),
    ("decode", "float32", "sm_90"): (16, 16, 4, 3),
    ("prefill", "d64", "sm_80"): (32, 64, 4, 2),
    # 64 rows of 4 warps spill on an A100; 128 of 8 do not, and use each key twice as often. An A10G
    # waits for its matrix units with any tile, so it takes the one with the most warps.
    ("prefill", "d128", "sm_80"): (64, 128, 8, 2),
    ("prefill", "d128", "sm_86"): (32, 64, 8, 2),
    ("prefill", "8bit", "sm_80"): (32, 64, 4, 2),  # widening takes registers: 128 rows spill
    ("prefill", "d128", "sm_90"): (64, 64, 4, 2),
    ("prefill", "d256", "sm_80"): (32, 64, 8, 2),
    ("prefill", "d256", "sm_90"): (32, 64, 8, 2),
    ("prefill", "float32", "sm_80"): (16, 16, 4, 3),
    ("prefill", "float32", "sm_90"): (16, 16, 4, 3),
    ("shared_prefix", "d64", "sm_80"): (32, 32, 4, 2),
    ("shared_prefix", "d128", "sm_80"): (64, 64, 8, 2),
    ("shared_prefix", "d128", "sm_90"): (32, 64, 4, 2),
    ("shared_prefix", "d256", "sm_80"): (32, 64, 8, 2),
    ("shared_prefix", "d256", "sm_90"): (32, 64, 8, 2),
    ("shared_prefix", "float32", "sm_80"): (16, 16, 4, 3),
    ("shared_prefix", "float32", "sm_90"): (16, 16, 4, 3),
}
"""By kind, numbers and card or, without a row of its own, generation: chosen from compile reports,
as `python -m pallas_kernels.check` prints them, and its --tune, which compares tiles by a model
(docs/decisions/0007); no card has timed a row of this table."""


def choose(
    kind: Kind,
    *,
    dtype: str,
    head_dim: int,
    group: int,
    target: Target,
    kv_dtype: str | None = None,
) -> Tuning:
    """The tuning for queries of `dtype` over a pool of `kv_dtype` (None: the same)."""
    del group  # a group changes only how many tiles there are, not their size
    block_k, query_rows, num_warps, num_stages = next(
        _SHAPES[kind, sizes, arch]
        for sizes in _sizes(dtype, kv_dtype or dtype, head_dim)
        for arch in (target.arch, "sm_90" if target.arch.startswith("sm_9") else "sm_80")
        if (kind, sizes, arch) in _SHAPES
    )
    return Tuning(
        block_k=block_k,
        query_rows=query_rows,
        partition_tokens=128,
        max_partition_tokens=1024,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _sizes(dtype: str, kv_dtype: str, head_dim: int) -> Iterator[str]:
    """Rows of the table that fit, the most particular first."""
    if dtype == "float32":
        yield "float32"
        return
    if kv_dtype in ("int8", "float8_e4m3fn") and head_dim <= 128:
        yield "8bit"
    if head_dim <= 64:
        yield "d64"
    yield "d128" if head_dim <= 128 else "d256"


def num_partitions(
    *, programs: int, capacity_tokens: int, tuning: Tuning, num_multiprocessors: int
) -> int:
    """How many parts a row of `capacity_tokens` tokens is cut into.

    `programs`: how many programs there are with one part a row. Enough parts for two programs a
    multiprocessor, so that one long row fills the card too; no part under partition_tokens or over
    max_partition_tokens.
    """
    filling = -(-2 * num_multiprocessors // max(programs, 1))
    most = -(-capacity_tokens // tuning.partition_tokens)
    least = -(-capacity_tokens // tuning.max_partition_tokens)
    return max(1, min(most, max(filling, least)))
