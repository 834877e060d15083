"""The paper's printed numbers beside ours: the real scheduler on a stub device, and its rivals.

    python -m benchmarks.paper             rows 1 to 10 (minutes)
    python -m benchmarks.paper --rows 1 3  some rows
    python -m benchmarks.paper --poisson   the latency-against-rate curves, modelled
    python -m benchmarks.paper --quick     a few requests, so that nothing here can rot
    ... --requests 500 --keep              fewer; writes to benchmarks/results, not benchmarks/out

Counts come from the project's own scheduler and block manager; every second in here is modelled
by a roofline (`benchmarks/sim/cost.py`), never measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from benchmarks import paper_rates, paper_rows, paper_sharing
from benchmarks.paper_verdict import HEADER, TRIED_HEADER, Effort, Row, all_tried
from benchmarks.picture import Axes, Series, line_chart
from benchmarks.publish import publish, table
from benchmarks.report import first_line
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES

ROWS: dict[int, Callable[[Effort], list[Row]]] = {
    1: paper_rows.memory_states,
    3: paper_rows.batches,
    5: paper_sharing.parallel_sampling,
    6: paper_sharing.beams,
    7: paper_rates.throughput,
    8: paper_sharing.shared_prefix,
    9: paper_sharing.block_sizes,
    10: paper_sharing.swapping,
}
"""Rows of the paper's table and what computes them; 1 answers 2 too, 3 answers 4."""


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--rows", type=int, nargs="*", choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--poisson", action="store_true", help="the curves instead of the rows")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    effort = Effort.quick() if args.quick else replace(Effort(), requests=args.requests)
    if args.poisson:
        poisson(effort, is_quick=args.quick, keep=args.keep)
        return
    rows = [row for number in args.rows for row in ROWS[number](effort)]
    lines = table(HEADER, [row.cells() for row in rows])
    if tried := all_tried(rows):
        lines += ["", "Rows outside their bands, computed again with one thing changed:", ""]
        lines += table(TRIED_HEADER, tried)
    record = {"site": PAPER_SITE.constants(), "requests": effort.requests,
              "rows": [row.record() for row in rows]}  # fmt: skip
    publish("paper", record, lines, {}, is_quick=args.quick, keep=args.keep)


def poisson(effort: Effort, *, is_quick: bool, keep: bool) -> None:
    """Fig. 12 and its kin: mean normalised latency by rate, and the rates held."""
    record: dict[str, object] = {}
    pictures: dict[str, str] = {}
    rows: list[tuple[object, ...]] = []
    for site_name, lengths_name, pairs in (
        ("opt13b_a100", "sharegpt_means", lengths.sharegpt_at_means()),
        ("opt13b_a100", "alpaca_like", lengths.alpaca_like(5000)),
        ("llama7b_a10g", "sharegpt", lengths.sharegpt()),
        ("llama13b_a100", "sharegpt", lengths.sharegpt()),
        ("llama13b_h200", "sharegpt", lengths.sharegpt()),
    )[: 1 if is_quick else None]:
        site, key = SITES[site_name], f"{site_name}_{lengths_name}"
        found = paper_rates.curves(site, pairs, effort)
        limit = paper_rates.LIMIT * paper_rates.idle_latency(found)
        ours = found[0].sustained(limit)
        for curve in found:
            held = curve.sustained(limit)
            rows.append((site.name, lengths_name, curve.system, held, f"{ours / held:.2f}x"))
        record[key] = {"limit_s": limit, "mean_lengths": lengths.mean_lengths(pairs),
                       "curves": {curve.system: curve.points for curve in found},
                       "site": site.constants()}  # fmt: skip
        title = f"{site.name}, {lengths_name.replace('_', ' ')} lengths (modelled)"
        axes = Axes(title, "requests a second", "mean seconds a token", most_y=2 * limit)
        pictures[key] = line_chart(axes, [Series(c.system, c.points, True) for c in found])
        print(key, flush=True)
    twin = paper_rates.check_twin(PAPER_SITE, lengths.sharegpt(), 20 if is_quick else 250)
    record["twin"] = twin
    header = ("site", "lengths", "system", "rate held, requests/s (modelled)", "ours over it")
    lines = [
        *table(header, rows),
        "",
        "The paged curves are the counting twin's; near the knee the real scheduler has "
        f"{twin['real_s']:.4f} s a token and the twin {twin['twin_s']:.4f}.",
    ]
    publish("paper_poisson", record, lines, pictures, is_quick=is_quick, keep=keep)


if __name__ == "__main__":
    main()
