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

    @classmethod
    def gradual(cls, last: int) -> Ladder:
        """1, 2, 4, 8, 12, ... 64, 72, ... 128, 144, ...: padding is 3 at most, above 64 a ninth."""
        sizes, size = [], 1
        while size < last:
            sizes.append(size)
            power = 1 << (size.bit_length() - 1)  # of two, at most the size
            size += min(size, max(4, power // 8))
        return cls((*sizes, last))

    def fit(self, count: int) -> int:
        """The smallest rung of at least `count`; overflowing the ladder is our own mistake."""
        assert 0 < count <= self.sizes[-1], f"{count} does not fit the ladder {self.sizes}"
        return self.sizes[bisect_left(self.sizes, count)]


def cut_to_rung(num_tokens: int, ladder: Ladder) -> int:
    """How many of `num_tokens` to prefill in this step, so that little padding is computed.

    Neither the part nor the rest is smaller than the first rung, and together, padded, they are
    less than the whole, padded. On the rungs 16, 32, 64, 128, as (padded to):

        100 -> 100 (128)    a quarter or less is padding
         90 ->  64 (64)     26 (32) are left; uncut it would be 128
         65 ->  49 (64)     16 (16) are left
         17 ->  17 (32)     nothing to cut off
    """
    first, whole = ladder.sizes[0], ladder.fit(num_tokens)
    if whole - num_tokens <= MAX_PADDING * whole or num_tokens < 2 * first:
        return num_tokens
    below = ladder.sizes[bisect_right(ladder.sizes, num_tokens) - 1]
    part = min(below, num_tokens - first)
    is_cheaper = ladder.fit(part) + ladder.fit(num_tokens - part) < whole
    return part if is_cheaper else num_tokens
