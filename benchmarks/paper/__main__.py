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
from collections.abc import Sequence as Seq
from dataclasses import replace

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, bar_chart
from benchmarks.paper import latency, memory, rates, sharing
from benchmarks.paper.verdict import (
    HEADER,
    TRIED_HEADER,
    Effort,
    Part,
    Row,
    all_tried,
    each,
    rows_of,
)
from benchmarks.sim.cost import PAPER_SITE

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
        record, lines, pictures = latency.poisson(effort, args.processes, is_quick=args.quick)
        save(
            "paper_poisson", record, lines=lines, pictures=pictures,
            is_quick=args.quick, keep=args.keep,
        )  # fmt: skip
        return
    parts = [part for number in args.rows for part in ROWS[number]]
    rows = [row for found in each(rows_of, parts, effort, args.processes) for row in found]
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


if __name__ == "__main__":
    main()
