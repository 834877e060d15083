"""How large a kernel's tiles are and how far it splits: the only place that knows cards.

The numbers are what compiled best for each card (registers, spills, shared memory); a kernel is
right with any of them.
"""

from __future__ import annotations

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
    """Tokens of K and V that one turn of the loop reads."""
    query_rows: int
    """Rows of a query tile, one a query and head; raised to what one query's group needs."""
    partition_tokens: int
    """Fewest tokens that are worth a program of their own."""
    max_partition_tokens: int
    """Most tokens of a program, so that one long row does not outlast all others."""
    num_warps: int
    num_stages: int


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
    del group, target, kv_dtype
    is_wide = dtype == "float32"
    block_k = 16 if is_wide else 64 if head_dim <= 128 else 32
    query_rows = 16 if kind == "decode" or is_wide else 64
    return Tuning(
        block_k=block_k,
        query_rows=query_rows,
        partition_tokens=128,
        max_partition_tokens=1024,
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
    )


def num_partitions(
    *, programs: int, capacity_tokens: int, tuning: Tuning, num_multiprocessors: int
) -> int:
    """Into how many parts the longest row is cut, `programs` being the programs without cuts.

    Enough for two programs a multiprocessor, so that one long row fills the card too; no part
    under partition_tokens or over max_partition_tokens.
    """
    filling = -(-2 * num_multiprocessors // max(programs, 1))
    most = -(-capacity_tokens // tuning.partition_tokens)
    least = -(-capacity_tokens // tuning.max_partition_tokens)
    return max(1, min(most, max(filling, least)))
