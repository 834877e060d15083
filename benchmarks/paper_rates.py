"""Rows 7 and 8 and the latency-against-rate curves: everything here is modelled time.

A rate is sustained while the mean normalised latency (seconds from arrival to end, by token of
output) stays under `LIMIT` times what an idle machine needs; the paper shows curves without a
number for the knee, so the limit is ours, the same for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.paper_rows import Effort, Row, in_range
from benchmarks.publish import found_record
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES, Site
from benchmarks.sim.counting import CountingEngine
from benchmarks.sim.lengths import Job
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import paged
from benchmarks.sim.policies import faster, orca, tgi, transformers

LIMIT = 5.0
SHARES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Rates tried, as shares of the paged engine's saturated requests a second."""

Policy = Callable[[Site, Seq[Job]], Outcome]
RIVALS: dict[str, Policy] = {
    "Orca Oracle": lambda site, jobs: orca(site, jobs, "oracle"),
    "Orca Pow2": lambda site, jobs: orca(site, jobs, "pow2"),
    "Orca Max": lambda site, jobs: orca(site, jobs, "max"),
    "FasterTransformer": faster,
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One system's mean normalised latency by rate."""

    system: str
    points: tuple[tuple[float, float], ...]
    """(requests a second, seconds a token)"""

    def sustained(self, limit_s: float) -> float:
        """The rate at which the curve crosses the limit, between two of its points."""
        before: tuple[float, float] | None = None
        for rate, latency in self.points:
            if latency > limit_s:
                if before is None:
                    return rate * limit_s / latency
                share = (limit_s - before[1]) / (latency - before[1])
                return before[0] + share * (rate - before[0])
            before = rate, latency
        return self.points[-1][0]


def throughput(effort: Effort) -> list[Row]:
    """Row 7, blog: requests a second with everything waiting from the start; then the paper's."""
    rows: list[Row] = sustained(effort)
    pairs = lengths.sharegpt()
    for samples, printed in ((1, ((14, 24), (2.2, 2.5))), (3, ((8.5, 15), (3.3, 3.5)))):
        for name in ("llama7b_a10g", "llama13b_a100"):
            site = SITES[name]
            jobs = lengths.at_once(pairs, max(effort.requests // (3 * samples), 8), samples=samples)
            ours = paged(site, jobs).requests_per_s
            for rival, run, span in (
                ("Transformers", transformers, printed[0]),
                ("TGI", tgi, printed[1]),
            ):
                ratio = ours / run(site, jobs).requests_per_s
                rows.append(Row(
                    "7", f"throughput over {rival}, {samples} output(s), {site.name} (modelled)",
                    f"{span[0]}-{span[1]}x", ratio, in_range(*span, ratio), 0.25, False,
                    lengths.mean_of_jobs(jobs), REASONS[rival],
                ))  # fmt: skip
    return rows


REASONS = {
    "Transformers": "the model grants it our kernels; its eager Python is not in it",
    "TGI": "the model grants it exact output lengths and no padding",
    "Orca Oracle": "the roofline makes a large batch cheaper than the paper's kernels did",
}


def sustained(effort: Effort) -> list[Row]:
    """Row 7, paper: rates sustained, over Orca and FasterTransformer."""
    rows: list[Row] = []
    spans = {"Orca Oracle": (1.7, 2.7), "Orca Max": (2.7, 8.0), "FasterTransformer": (8.0, 22.0)}
    for key, name, pairs in (
        ("sharegpt_means", "ShareGPT at the paper's means", lengths.sharegpt_at_means()),
        ("alpaca_like", "Alpaca-like", lengths.alpaca_like(5000)),
    ):
        found = kept_curves(f"opt13b_a100_{key}") or curves(PAPER_SITE, pairs, effort)
        limit = LIMIT * idle_latency(found)
        ours = found[0].sustained(limit)
        for curve in found[1:]:
            if curve.system in spans:
                span, ratio = spans[curve.system], ours / curve.sustained(limit)
                printed = f"{span[0]}-{span[1]}x" if span[1] < 20 else "up to 22x"
                rows.append(Row(
                    "7", f"rate over {curve.system}, OPT-13B, {name} (modelled)", printed, ratio,
                    in_range(*span, ratio), 0.25, False, lengths.mean_lengths(pairs),
                    REASONS.get(curve.system, "shorter requests, larger gap"),
                ))  # fmt: skip
    return rows


def curves(site: Site, pairs: Seq[tuple[int, int]], effort: Effort) -> list[Curve]:
    """The paged engine first, then its rivals, over Poisson arrivals.

    A trace has 40 times the requests that run at once, so that a queue shows; the counting twin
    stands in for the real scheduler, and `check_twin` holds it to that.
    """
    is_quick = effort.rates < 3
    capacity, batch = _capacity(site, pairs, 20 if is_quick else 4000)
    count = 40 if is_quick else int(40 * batch)
    rates = [capacity * share for share in SHARES[-effort.rates :]]
    systems: dict[str, Policy | None] = {"paged": None, **RIVALS}
    return [
        Curve(name, tuple(_points(run, site, pairs, rates, count))) for name, run in systems.items()
    ]


def check_twin(site: Site, pairs: Seq[tuple[int, int]], count: int) -> dict[str, float]:
    """Mean normalised latency near the knee, of the real scheduler and of its twin."""
    capacity, _ = _capacity(site, pairs, count)
    jobs = lengths.poisson(pairs, 0.95 * capacity, count / capacity)
    totals = CountingEngine(site, max_num_seqs=256).run(iter(jobs))
    real = paged(site, jobs).mean_normalised
    return {"real_s": real, "twin_s": totals.normalised_sum_s / totals.requests}


def kept_curves(key: str) -> list[Curve]:
    """What `--poisson` found before, or nothing."""
    record = found_record("paper_poisson") or {}
    kept = record.get(key, {}).get("curves", {})
    return [Curve(system, tuple((x, y) for x, y in points)) for system, points in kept.items()]


def idle_latency(found: Seq[Curve]) -> float:
    """Seconds a token at the lowest rate of the paged engine."""
    return found[0].points[0][1]


def _points(
    run: Policy | None, site: Site, pairs: Seq[tuple[int, int]], rates: Seq[float], count: int
) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for rate in rates:
        jobs = lengths.poisson(pairs, rate, count / rate)
        if run is None:
            totals = CountingEngine(site).run(iter(jobs))
            latency = totals.normalised_sum_s / totals.requests
        else:
            latency = run(site, jobs).mean_normalised
        points.append((rate, latency))
        if len(points) > 1 and latency > 40 * points[0][1]:
            break  # far past the knee: higher rates only cost time
    return points


def _capacity(site: Site, pairs: Seq[tuple[int, int]], count: int) -> tuple[float, float]:
    """(requests a second, requests at once) with everything waiting from the start."""
    totals = CountingEngine(site).run(iter(lengths.at_once(pairs, count)))
    return totals.requests / totals.seconds, totals.mean_batch
