"""The whole pool at one moment, as a value that a picture can be drawn of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BlockKind = Literal["free", "cached", "owned", "held"]


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """One block.

    free     nobody's
    cached   idle: full, kept for a prefix hit, free when room is needed
    owned    in the tables of `seq_ids`; more than one share it
    held     in no table, but a step or a copy that touches it is under way
    """

    kind: BlockKind
    seq_ids: tuple[int, ...] = ()
    num_filled: int = 0
    """Slots that hold a token; 0 for held blocks, whose content nobody needs."""
    is_cached: bool = False
    """A prefix hit would find it; always true of kind "cached"."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Blocks 1 to num_blocks: `blocks[i]` is block i + 1. The null block is left out."""

    block_size: int
    blocks: tuple[MappedBlock, ...]
    request_of: Mapping[int, str] = field(default_factory=dict)
    """Request ids by the sequence ids of those that have not ended."""
