"""A printed number, ours, and the verdict: within its band, or what was changed to find out why.

A reason is never a guess. A row outside its band is computed again with one thing changed at a
time; a change that brings it inside is the reason given, and without one it is "not explained".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any, TypeVar

HEADER = ("row", "what", "printed", "ours", "deviation", "verdict", "lengths in/out")
TRIED_HEADER = ("row", "what", "printed", "ours", "changed", "ours then", "then")
Given = TypeVar("Given")
Found = TypeVar("Found")
Changes = Mapping[str, Callable[[], float]]
"""What to change, in words, and what computes the row's figure with it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many requests a row is computed from."""

    requests: int = 1500
    rates: int = 9

    @classmethod
    def quick(cls) -> Effort:
        return cls(requests=40, rates=2)


@dataclass(frozen=True, slots=True)
class Row:
    """One printed number and ours."""

    number: str
    what: str
    printed: str
    ours: float
    span: tuple[float, float]
    """The printed value twice, or the ends of the printed range."""
    band: float
    """How far ours may be off: in points when `in_points`, else as a share."""
    in_points: bool
    mean_lengths: tuple[float, float]
    tried: tuple[tuple[str, float], ...] = ()
    """Outside only: what was changed, and ours with it."""

    @property
    def deviation(self) -> float:
        return self.away(self.ours)

    @property
    def is_within(self) -> bool:
        return abs(self.deviation) <= self.band

    def away(self, value: float) -> float:
        """How far a value is from the nearest printed one."""
        nearest = min(max(value, self.span[0]), self.span[1])
        return value - nearest if self.in_points else (value - nearest) / nearest

    @property
    def verdict(self) -> str:
        if self.is_within:
            return "within"
        if not self.tried:
            return "outside, not explained"
        what, value = min(self.tried, key=lambda each: abs(self.away(each[1])))
        if abs(self.away(value)) <= self.band:
            return f"outside; within with {what} ({value:.3g})"
        return f"outside, not explained; nearest with {what} ({value:.3g})"

    def cells(self) -> tuple[str, ...]:
        means = f"{self.mean_lengths[0]:.0f} / {self.mean_lengths[1]:.0f}"
        ours, deviation = f"{self.ours:.2f}", self._told(self.ours)
        return (self.number, self.what, self.printed, ours, deviation, self.verdict, means)

    def tried_cells(self) -> list[tuple[str, ...]]:
        """A line for each change."""
        return [
            (self.number, self.what, self.printed, f"{self.ours:.2f}", what, f"{value:.2f}",
             "within" if abs(self.away(value)) <= self.band else f"outside, {self._told(value)}")
            for what, value in self.tried
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        found = {"deviation": self.deviation, "is_within": self.is_within, "verdict": self.verdict}
        return {**asdict(self), **found}

    def _told(self, value: float) -> str:
        away = self.away(value)
        return f"{away:+.1f} points" if self.in_points else f"{away:+.0%}"


Part = Callable[[Effort], list[Row]]
"""What computes some rows."""


def judged(row: Row, changes: Changes) -> Row:
    """The row; outside its band, with everything tried that could say why."""
    if row.is_within:
        return row
    return replace(row, tried=tuple((what, compute()) for what, compute in changes.items()))


def one(value: float) -> tuple[float, float]:
    """The span of a single printed value."""
    return value, value


def all_tried(rows: Seq[Row]) -> list[tuple[str, ...]]:
    return [cells for row in rows for cells in row.tried_cells()]


def rows_of(part: Part, effort: Effort) -> list[Row]:
    """What one part computes; here, where another process finds it."""
    return part(effort)


def each(
    compute: Callable[[Given, Effort], Found], givens: Seq[Given], effort: Effort, processes: int
) -> list[Found]:
    """What is computed of each, in order, by as many processes."""
    if processes == 1:
        return [compute(given, effort) for given in givens]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return list(pool.map(compute, givens, repeat(effort)))
