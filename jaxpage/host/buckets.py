"""Ladders of sizes: a step is padded to the next rung, so few programs are ever compiled."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

MAX_PADDING = 0.25
"""Most of a prefill step that may be padding, where cutting it can help."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Increasing sizes; the last one is the most that can be asked for."""

    sizes: tuple[int, ...]

    @classmethod
    def doubling(cls, first: int, last: int) -> Ladder:
        """first, 2 first, 4 first, ... and `last` itself: doubling(1, 6) is 1, 2, 4, 6."""
        assert first >= 1, (first, last)
        sizes = []
        while first < last:
            sizes.append(first)
            first *= 2
        return cls((*sizes, last))

    def fit(self, count: int) -> int:
        """The smallest rung of at least `count`; overflowing the ladder is our own mistake."""
        assert 0 < count <= self.sizes[-1], f"{count} does not fit the ladder {self.sizes}"
        return self.sizes[bisect_left(self.sizes, count)]


def cut_to_rung(num_tokens: int, ladder: Ladder) -> int:
    """How many of `num_tokens` to prefill in this step, so that little padding is computed.

    Neither the part nor the rest is smaller than the first rung, so a cut never costs more
    tokens than it saves. On the rungs 16, 32, 64, 128, as (padded to):

        100 -> 100 (128)    padding is 22%
         90 ->  64 (64)     26 (32) are left; uncut it would be 128
         65 ->  49 (64)     16 (16) are left
         17 ->  17 (32)     nothing to cut off
    """
    rung = ladder.fit(num_tokens)
    if rung - num_tokens <= MAX_PADDING * rung or num_tokens < ladder.sizes[0]:
        return num_tokens
    below = ladder.sizes[bisect_right(ladder.sizes, num_tokens) - 1]
    part = min(below, num_tokens - ladder.sizes[0])
    return part if part >= ladder.sizes[0] else num_tokens
