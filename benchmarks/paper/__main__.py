"""The paper's printed numbers beside ours: the real scheduler on a stub device, and its rivals.

    python -m benchmarks.paper             rows 1 to 10 (minutes)
    python -m benchmarks.paper --rows 1 3  some rows
    python -m benchmarks.paper --poisson   the latency-against-rate curves, modelled
    python -m benchmarks.paper --quick     a few requests, so that nothing here can rot
    ... --requests 500 --keep              fewer; writes to benchmarks/results, not benchmarks/out
    ... --processes 4                      as many parts at once; the figures are the same

Counts come from the project's own scheduler and block manager; every second in here is modelled
by a roofline (`benchmarks/sim/cost.py`), never measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import TypeVar

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, Series, bar_chart, line_chart
from benchmarks.paper import memory, rates, sharing
from benchmarks.paper.memory import ALPACA, AT_MEANS, REAL
from benchmarks.paper.verdict import HEADER, TRIED_HEADER, Effort, Row, all_tried
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES

Given = TypeVar("Given")
Found = TypeVar("Found")
Part = Callable[[Effort], list[Row]]
ROWS: dict[int, tuple[Part, ...]] = {
    1: (memory.memory_states,),
    3: (memory.batches,),
    5: (sharing.parallel_sampling,),
    6: (sharing.beams,),
    7: (rates.sustained, rates.throughput),
    8: (sharing.shared_prefix,),
    9: (sharing.block_sizes,),
    10: (sharing.swapping,),
}
"""Rows of the paper's table and what computes them; 1 answers 2 too, 3 answers 4."""
PLACES = (
    ("opt13b_a100", AT_MEANS), ("opt13b_a100", ALPACA), ("llama7b_a10g", REAL),
    ("llama13b_a100", REAL), ("llama13b_h200", REAL),
)  # fmt: skip
"""Sites and lengths of the curves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--rows", type=int, nargs="*", choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--poisson", action="store_true", help="the curves instead of the rows")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    effort = Effort.quick() if args.quick else replace(Effort(), requests=args.requests)
    if args.poisson:
        poisson(effort, args.processes, is_quick=args.quick, keep=args.keep)
        return
    parts = [part for number in args.rows for part in ROWS[number]]
    rows = [row for found in each(_apply, parts, effort, args.processes) for row in found]
    lines = table(HEADER, [row.cells() for row in rows])
    if 6 in args.rows and all(row.number != "6" for row in rows):
        lines += ["", f"Row 6 is open: first run `{sharing.BEAMS_COMMAND}`."]
    if tried := all_tried(rows):
        lines += ["", "Rows outside their bands, computed again with one thing changed:", ""]
        lines += table(TRIED_HEADER, tried)
    record = {"site": PAPER_SITE.constants(), "requests": effort.requests,
              "rows": [row.record() for row in rows]}  # fmt: skip
    pictures = {"batches": batches_picture(rows)} if 3 in args.rows else {}
    save("paper", record, lines=lines, pictures=pictures, is_quick=args.quick, keep=args.keep)


def batches_picture(rows: Seq[Row]) -> str:
    """Fig. 13 and ours, from rows 3 and 4: four systems each, at the paper's means."""
    ours = [row.ours for row in rows if row.number in ("3", "4")]
    bars = [
        ("printed, ShareGPT", memory.BATCHES["ShareGPT"]), ("ours, ShareGPT", ours[:4]),
        ("printed, Alpaca", memory.BATCHES["Alpaca"]), ("ours, Alpaca-like", ours[-4:]),
    ]  # fmt: skip
    axes = Axes("Requests that run at once: printed, and counted here", "", "mean batch",
                log_y=True)  # fmt: skip
    return bar_chart(axes, memory.SYSTEMS, bars, modelled=None)


def each(
    compute: Callable[[Given, Effort], Found], givens: Seq[Given], effort: Effort, processes: int
) -> list[Found]:
    """What is computed of each, in order, by as many processes."""
    if processes == 1:
        return [compute(given, effort) for given in givens]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return list(pool.map(compute, givens, repeat(effort)))


def _apply(part: Part, effort: Effort) -> list[Row]:
    return part(effort)


def _curves(place: tuple[str, str], effort: Effort) -> list[rates.Curve]:
    site, name = place
    return rates.curves(SITES[site], memory.workloads(0)[name], effort)


def poisson(effort: Effort, processes: int, *, is_quick: bool, keep: bool) -> None:
    """Fig. 12 and its kin: mean normalised latency by rate, and the rates held."""
    record: dict[str, object] = {}
    pictures: dict[str, str] = {}
    rows: list[tuple[object, ...]] = []
    pairs_of = memory.workloads(0)
    places = PLACES[: 1 if is_quick else None]
    all_found = each(_curves, places, effort, processes)
    for (site_name, name), found in zip(places, all_found, strict=True):
        site, pairs = SITES[site_name], pairs_of[name]
        key = f"{site_name}_{'alpaca' if name == ALPACA else 'sharegpt'}"
        limit = rates.LIMIT * rates.idle_latency(found)
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
    twin = rates.check_twin(PAPER_SITE, lengths.sharegpt(), 20 if is_quick else 250)
    record["twin"] = twin
    header = ("site", "lengths", "system", "rate held, requests/s (modelled)", "ours over it")
    lines = [
        *table(header, rows),
        "",
        "The paged curves are the counting twin's; near the knee the real scheduler has "
        f"{twin['real_s']:.4f} s a token and the twin {twin['twin_s']:.4f}.",
    ]
    save("paper_poisson", record, lines=lines, pictures=pictures, is_quick=is_quick, keep=keep)


if __name__ == "__main__":
    main()
