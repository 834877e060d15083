"""What a simulated run is judged by: times of each job, means over time of the machine's state."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from benchmarks.sim.lengths import Job


@dataclass(slots=True)
class Meter:
    """Integrals over modelled time; means are over the time that was metered."""

    seconds: float = 0.0
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, **values: float) -> None:
        self.seconds += seconds
        self.steps += 1
        sums = self.sums
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * seconds

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / self.seconds if self.seconds else 0.0

    def ratio(self, over: str, under: str) -> float:
        """Ratio of two means."""
        below = self.sums.get(under, 0.0)
        return self.sums.get(over, 0.0) / below if below else 0.0


@dataclass(slots=True)
class Outcome:
    """One policy's run over one trace; seconds are modelled."""

    jobs: Seq[Job]
    meter: Meter
    first_s: list[float | None]
    """When each job's first token was there; None: never."""
    finish_s: list[float | None]
    end_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        return sum(done is not None for done in self.finish_s)

    @property
    def output_tokens(self) -> int:
        return sum(
            job.output * job.samples
            for job, done in zip(self.jobs, self.finish_s, strict=True)
            if done is not None
        )

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.end_s if self.end_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_done / self.end_s if self.end_s else 0.0

    def latencies(self) -> list[float]:
        """End to end, seconds, of those done."""
        pairs = zip(self.jobs, self.finish_s, strict=True)
        return [done - job.arrival_s for job, done in pairs if done is not None]

    def first_token(self) -> list[float]:
        pairs = zip(self.jobs, self.first_s, strict=True)
        return [first - job.arrival_s for job, first in pairs if first is not None]

    def normalised(self) -> list[float]:
        """Seconds of latency a token of output: the paper's measure."""
        pairs = zip(self.jobs, self.finish_s, strict=True)
        return [(done - job.arrival_s) / job.output for job, done in pairs if done is not None]

    @property
    def mean_normalised(self) -> float:
        found = self.normalised()
        return statistics.mean(found) if found else float("inf")


def percentile(values: Seq[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
