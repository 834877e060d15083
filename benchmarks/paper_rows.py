"""Rows 1 to 4 of the paper's numbers: what memory holds, and how many requests run at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import paged
from benchmarks.sim.policies import orca

SYSTEMS = ("Orca Max", "Orca Pow2", "Orca Oracle", "paged")


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
    nearest: float
    """The printed value, or the end of the printed range that ours is nearest to."""
    band: float
    """How far ours may be off: in points when `in_points`, else as a share."""
    in_points: bool
    mean_lengths: tuple[float, float]
    reason: str = ""
    """Why it is outside, when it is."""

    @property
    def deviation(self) -> float:
        away = self.ours - self.nearest
        return away if self.in_points else away / self.nearest

    @property
    def is_within(self) -> bool:
        return abs(self.deviation) <= self.band

    def cells(self) -> tuple[str, ...]:
        unit = f"{self.deviation:+.1f} points" if self.in_points else f"{self.deviation:+.0%}"
        verdict = "within" if self.is_within else f"outside: {self.reason or 'see below'}"
        means = f"{self.mean_lengths[0]:.0f} / {self.mean_lengths[1]:.0f}"
        return (self.number, self.what, self.printed, f"{self.ours:.2f}", unit, verdict, means)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "deviation": self.deviation, "is_within": self.is_within}


def in_range(low: float, high: float, value: float) -> float:
    """The nearest value of a printed range."""
    return min(max(value, low), high)


def saturated(jobs: Seq[lengths.Job]) -> dict[str, Outcome]:
    """The four systems with every job waiting from the start, until none waits any more."""
    found = {
        f"Orca {kind.capitalize()}": orca(PAPER_SITE, jobs, kind, drained=False)
        for kind in ("max", "pow2", "oracle")
    }
    return {**found, "paged": paged(PAPER_SITE, jobs, drained=False)}


def memory_states(effort: Effort) -> list[Row]:
    """Fig. 2: slots that hold a token's state, of the memory that requests have been given."""
    rows: list[Row] = []
    for name, pairs in (
        ("at the paper's means", lengths.sharegpt_at_means()),
        ("real lengths", lengths.sharegpt()),
    ):
        jobs = lengths.at_once(pairs, effort.requests)
        means, found = lengths.mean_of_jobs(jobs), saturated(jobs)
        for system, printed in zip(SYSTEMS, (20.4, 26.8, 38.2, 96.3), strict=True):
            share = 100 * found[system].meter.ratio("stored", "reserved")
            what = f"token states, % of KV memory, {system}, {name}"
            rows.append(Row("1", what, f"{printed}", share, printed, 3.0, True, means,
                            "other lengths than the paper's sample"))  # fmt: skip
        waste = 100 - 100 * found["paged"].meter.ratio("stored", "reserved")
        rows.append(Row("2", f"waste, %, paged, {name}", "< 4", waste,
                        in_range(0, 4, waste), 0.0, True, means))  # fmt: skip
        worst = 100 - 100 * found["Orca Max"].meter.ratio("stored", "reserved")
        rows.append(Row("2", f"waste, %, Orca Max, {name}", "60-80", worst,
                        in_range(60, 80, worst), 3.0, True, means))  # fmt: skip
    return rows


def batches(effort: Effort) -> list[Row]:
    """Fig. 13: requests that run at once, saturated."""
    rows: list[Row] = []
    count = effort.requests
    for number, name, pairs, printed in (
        ("3", "ShareGPT, paper's means", lengths.sharegpt_at_means(), (7.0, 9.81, 13.62, 30.42)),
        ("3", "ShareGPT, real lengths", lengths.sharegpt(), (7.0, 9.81, 13.62, 30.42)),
        ("4", "Alpaca-like", lengths.alpaca_like(3 * count), (7.0, 43.24, 72.75, 132.44)),
    ):
        jobs = lengths.at_once(pairs, count * (2 if number == "4" else 1))
        means, found = lengths.mean_of_jobs(jobs), saturated(jobs)
        for system, value in zip(SYSTEMS, printed, strict=True):
            batch = found[system].meter.mean("batch")
            rows.append(Row(number, f"mean batch, {system}, {name}", f"{value}", batch, value,
                            0.25, False, means, "shorter answers: more fit"))  # fmt: skip
    return rows
