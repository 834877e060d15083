"""Row 7 and the latency-against-rate curves: everything here is modelled time.

A rate is sustained while the mean normalised latency (seconds from arrival to end, by token of
output) stays under `LIMIT` times what an idle machine needs; the paper shows curves without a
number for the knee, so the limit is ours, the same for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial

from benchmarks.paper.memory import ALPACA, AT_MEANS, SLOW, workloads
from benchmarks.paper.verdict import Changes, Effort, Row, judged
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES, Site, as_printed
from benchmarks.sim.counting import CountingEngine
from benchmarks.sim.lengths import Job
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import paged
from benchmarks.sim.policies import copying, faster, orca, reserving, tgi, transformers

LIMIT = 5.0
OTHER_LIMIT_S = 1.0
"""Seconds a token: the top of the paper's axes, as another limit."""
SHARES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Rates tried, as shares of the paged engine's saturated requests a second."""
MOST_HALVINGS = 12
"""Of the lowest rate, for a system that does not even hold that."""
REFINEMENTS = 4
"""Times the gap is halved between a rate that is held and the next one, which is not."""

Policy = Callable[[Site, Seq[Job]], Outcome]
RIVALS: dict[str, Policy] = {
    "Orca Oracle": partial(orca, kind="oracle"),
    "Orca Pow2": partial(orca, kind="pow2"),
    "Orca Max": partial(orca, kind="max"),
    "FasterTransformer": faster,
}
SPANS = {"Orca Oracle": (1.7, 2.7), "Orca Max": (2.7, 8.0), "FasterTransformer": (1.0, 22.0)}
"""Rates held over these, ShareGPT; of FasterTransformer the paper says "up to"."""
BLOG = {
    ("Transformers", 1): (14, 24), ("Transformers", 3): (8.5, 15),
    ("TGI", 1): (2.2, 2.5), ("TGI", 3): (3.3, 3.5),
}  # fmt: skip
"""Throughput over these, by outputs a request."""


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
    """Row 7, blog: requests a second with everything waiting from the start."""
    rows: list[Row] = []
    for (rival, samples), span in BLOG.items():
        for name in ("llama7b_a10g", "llama13b_a100"):
            site = SITES[name]
            count = max(effort.requests // samples, 8)
            jobs = lengths.at_once(lengths.sharegpt(), count, samples=samples)
            ours = paged(site, jobs).requests_per_s
            run, others = {"Transformers": (transformers, {}), "TGI": (tgi, TGI_CHANGES)}[rival]
            ratio = ours / run(site, jobs).requests_per_s
            row = Row("7", f"throughput over {rival}, {samples} output(s), {site.name} (modelled)",
                      f"{span[0]}-{span[1]}x", ratio, span, 0.25, False,
                      lengths.mean_of_jobs(jobs))  # fmt: skip
            changes: dict[str, Callable[[], float]] = {
                what: lambda ours=ours, site=site, jobs=jobs, other=other: (
                    ours / other(site, jobs).requests_per_s
                )
                for what, other in others.items()
            }
            slow = partial(_faster_by, as_printed(site), jobs, run)
            rows.append(judged(row, {**changes, SLOW: slow}))
    return rows


TGI_CHANGES: dict[str, Policy] = {
    "1,024 tokens reserved for every answer": partial(reserving, answer=1024),
    "the KV copied at each step": copying,
}
"""What the rival's policy may have been instead: the blog does not say how it was set."""


def _faster_by(site: Site, jobs: Seq[Job], run: Policy) -> float:
    return paged(site, jobs).requests_per_s / run(site, jobs).requests_per_s


def sustained(effort: Effort) -> list[Row]:
    """Row 7, paper: rates sustained, over Orca and FasterTransformer."""
    rows: list[Row] = []
    for name in (AT_MEANS, ALPACA):
        pairs = workloads(effort.requests)[name]
        found = curves(PAPER_SITE, pairs, effort)
        slow = cache(partial(curves, as_printed(PAPER_SITE), pairs, effort))
        jobs = lengths.at_once(pairs, effort.requests)
        for system, span in SPANS.items():
            printed = f"{span[0]}-{span[1]}x" if span[1] < 20 else "up to 22x"
            row = Row("7", f"rate over {system}, OPT-13B, {name} (modelled)",
                      printed + " (ShareGPT)" * (name == ALPACA), held_over(found, system), span,
                      0.25, False, lengths.mean_lengths(pairs))  # fmt: skip
            rows.append(judged(row, _other_ways(system, found, slow, jobs)))
    return rows


def _other_ways(
    system: str, found: list[Curve], slow: Callable[[], list[Curve]], jobs: Seq[Job]
) -> Changes:
    """Other prices of a step, other limits, and no arrivals at all."""
    return {
        SLOW: lambda: held_over(slow(), system),
        f"a limit of {OTHER_LIMIT_S:g} s a token": lambda: held_over(found, system, OTHER_LIMIT_S),
        f"{SLOW} and a limit of {OTHER_LIMIT_S:g} s a token":
            lambda: held_over(slow(), system, OTHER_LIMIT_S),
        "throughput with all waiting in place of the rate held":
            lambda: _faster_by(PAPER_SITE, jobs, RIVALS[system]),
        f"throughput with all waiting, {SLOW}":
            lambda: _faster_by(as_printed(PAPER_SITE), jobs, RIVALS[system]),
    }  # fmt: skip


def held_over(found: Seq[Curve], system: str, limit_s: float | None = None) -> float:
    """The paged engine's rate over a rival's, under a limit; None: LIMIT times the idle latency."""
    limit_s = limit_s or LIMIT * idle_latency(found)
    rival = next(curve for curve in found if curve.system == system)
    return found[0].sustained(limit_s) / rival.sustained(limit_s)


def curves(site: Site, pairs: Seq[tuple[int, int]], effort: Effort) -> list[Curve]:
    """The paged engine first, then its rivals, over Poisson arrivals.

    A trace has 40 times the requests that run at once, so that a queue shows; the counting twin
    stands in for the real scheduler, and `check_twin` holds it to that.
    """
    is_quick = effort.rates < 3
    capacity, batch = _capacity(site, pairs, 20 if is_quick else 4000)
    count = 40 if is_quick else int(40 * batch)
    rates = [capacity * share for share in SHARES[-effort.rates :]]
    traces = [lengths.poisson(pairs, rate, count / rate) for rate in rates]
    ours = Curve("paged", tuple(_points(_twin, site, rates, traces)))
    limit_s = LIMIT * idle_latency([ours])
    found = [ours]
    for name, policy in RIVALS.items():
        run = partial(_normalised, policy)
        points = _points(run, site, rates, traces)
        if not is_quick:
            _find_limit(points, limit_s, lambda rate, run=run: run(
                site, lengths.poisson(pairs, rate, count / rate)
            ))  # fmt: skip
        found.append(Curve(name, tuple(points)))
    return found


def check_twin(site: Site, pairs: Seq[tuple[int, int]], count: int) -> dict[str, float]:
    """Mean normalised latency near the knee, of the real scheduler and of its twin."""
    capacity, _ = _capacity(site, pairs, count)
    jobs = lengths.poisson(pairs, 0.95 * capacity, count / capacity)
    return {"real_s": paged(site, jobs).mean_normalised, "twin_s": _twin(site, jobs)}


def idle_latency(found: Seq[Curve]) -> float:
    """Seconds a token at the lowest rate of the paged engine."""
    return found[0].points[0][1]


def _points(
    run: Callable[[Site, Seq[Job]], float], site: Site, rates: Seq[float], traces: Seq[Seq[Job]]
) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for rate, jobs in zip(rates, traces, strict=True):
        points.append((rate, run(site, jobs)))
        if points[-1][1] > max(40 * points[0][1], 2 * OTHER_LIMIT_S):
            break  # far past the knee: higher rates only cost time
    return points


def _find_limit(
    points: list[tuple[float, float]], limit_s: float, latency: Callable[[float], float]
) -> None:
    """Adds rates below the lowest until one is held, then between that and what is not.

    Past the knee latency explodes, so a line across a wide gap would say far too little.
    """
    for _ in range(MOST_HALVINGS):
        if points[0][1] <= limit_s:
            break
        rate = points[0][0] / 2
        points.insert(0, (rate, latency(rate)))
    for _ in range(REFINEMENTS):
        place = next((i for i, (_, seconds) in enumerate(points) if seconds > limit_s), 0)
        if not place:
            return
        rate = (points[place - 1][0] + points[place][0]) / 2
        points.insert(place, (rate, latency(rate)))


def _twin(site: Site, jobs: Seq[Job]) -> float:
    totals = CountingEngine(site).run(iter(jobs))
    return totals.normalised_sum_s / totals.requests


def _normalised(policy: Policy, site: Site, jobs: Seq[Job]) -> float:
    return policy(site, jobs).mean_normalised


def _capacity(site: Site, pairs: Seq[tuple[int, int]], count: int) -> tuple[float, float]:
    """(requests a second, requests at once) with everything waiting from the start."""
    totals = CountingEngine(site).run(iter(lengths.at_once(pairs, count)))
    return totals.requests / totals.seconds, totals.mean_batch
