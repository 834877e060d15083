"""The paper's curves of mean latency by request rate, and the rate that each system holds."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import table
from benchmarks.common.svg import Axes, Series, line_chart
from benchmarks.paper.memory import ALPACA, AT_MEANS, REAL, workloads
from benchmarks.paper.rates import LIMIT, Curve, check_twin, curves, idle_latency
from benchmarks.paper.verdict import Effort, each
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES

PLACES = (
    ("opt13b_a100", AT_MEANS), ("opt13b_a100", ALPACA), ("llama7b_a10g", REAL),
    ("llama13b_a100", REAL), ("llama13b_h200", REAL),
)  # fmt: skip
"""Sites and lengths of the curves."""


def poisson(
    effort: Effort, processes: int, *, is_quick: bool
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """(record, lines of the table, pictures) of Fig. 12 and its kin: latencies, rates held."""
    record: dict[str, Any] = {}
    pictures: dict[str, str] = {}
    rows: list[tuple[object, ...]] = []
    pairs_of = workloads(0)
    places = PLACES[: 1 if is_quick else None]
    all_found = each(curves_at, places, effort, processes)
    for (site_name, name), found in zip(places, all_found, strict=True):
        site, pairs = SITES[site_name], pairs_of[name]
        key = f"{site_name}_{'alpaca' if name == ALPACA else 'sharegpt'}"
        limit = LIMIT * idle_latency(found)
        ours = found[0].sustained(limit)
        for curve in found:
            held = curve.sustained(limit)
            rows.append((site.name, name, curve.system, held, f"{ours / held:.2f}x"))
        record[key] = {"limit_s": limit, "mean_lengths": lengths.mean_lengths(pairs),
                       "curves": {curve.system: curve.points for curve in found},
                       "site": site.constants()}  # fmt: skip
        axes = Axes(f"{site.name}, {name}", "requests a second",
                    "mean latency, seconds a token of output", most_y=2 * limit)  # fmt: skip
        last = max(rate for curve in found for rate, _ in curve.points)
        drawn = [Series(curve.system, curve.points, True) for curve in found]
        drawn.append(Series("limit of a rate held", [(0.0, limit), (last, limit)], True))
        pictures[key] = line_chart(axes, drawn)
    twin = check_twin(PAPER_SITE, lengths.sharegpt(), 20 if is_quick else 250)
    record["twin"] = twin
    header = ("site", "lengths", "system", "rate held, requests/s (modelled)", "ours over it")
    lines = [
        *table(header, rows),
        "",
        "The paged curves are the counting twin's; near the knee the real scheduler has "
        f"{twin['real_s']:.4f} s a token and the twin {twin['twin_s']:.4f}.",
    ]
    return record, lines, pictures


def curves_at(place: tuple[str, str], effort: Effort) -> list[Curve]:
    """The curves of one site and one source of lengths."""
    site, name = place
    return curves(SITES[site], workloads(0)[name], effort)
