"""Ladders of sizes: a step is padded to the next rung, so few programs are ever compiled."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


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
