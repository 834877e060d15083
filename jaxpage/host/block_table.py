"""What the host knows of one sequence's blocks. Mutable: only the block manager changes it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.host.prefix_cache import CachedBlock, Space


@dataclass(slots=True, eq=False)
class BlockTable:
    """Block size 4, ten tokens stored, blocks (5 2 7 9), 5 cached, 7 shared with a sample:

    blocks         5: a b c d   2: e f g h   7: i j . .   9: . . . .
    num_stored     10           num_cached 1: block 2 may be entered under 5's entry
    num_writable   10           a write at 10 needs a copy of 7; were 7 its own: 16
    """

    block_ids: tuple[int, ...]
    num_stored: int
    num_writable: int
    """Positions from num_stored up to this one are in blocks of its own, so far as is known."""
    num_cached: int
    """Leading blocks that are entries of the prefix cache."""
    cache_at: int | None
    """Stored tokens at which the next block can be entered; None: nothing is cached any more."""
    parent: CachedBlock | Space
    """The entry of the last cached block, or the space while there is none."""
    space: Space
    epoch: int | None
    """The cache's when this was filled; None caches nothing."""
