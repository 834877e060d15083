"""The paper's printed numbers beside ours: the real scheduler on a stub device, and its rivals.

    python -m benchmarks.paper            every row (minutes)
    python -m benchmarks.paper --rows 1 3 some rows
    python -m benchmarks.paper --poisson  the latency-against-rate curves, modelled
    python -m benchmarks.paper --quick    a few requests, so that nothing here can rot
    ... --keep                            writes to benchmarks/results instead of benchmarks/out

Counts come from the project's own scheduler and block manager; every second in here is modelled
by a roofline (`benchmarks/sim/cost.py`), never measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.paper_rows import Effort, Row, batches, memory_states
from benchmarks.publish import publish, table
from benchmarks.report import first_line
from benchmarks.sim.cost import PAPER_SITE

ROWS: dict[int, Callable[[Effort], list[Row]]] = {
    1: memory_states,
    3: batches,
}
"""Rows of the paper's table and what computes them; 1 answers 2 too, 3 answers 4."""
HEADER = ("row", "what", "printed", "ours", "deviation", "verdict", "lengths in/out")


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--rows", type=int, nargs="*", choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    effort = Effort.quick() if args.quick else Effort()
    rows = [row for number in args.rows for row in ROWS[number](effort)]
    lines = table(HEADER, [row.cells() for row in rows])
    record = {"site": PAPER_SITE.constants(), "rows": [row.record() for row in rows]}
    publish("paper", record, lines, {}, is_quick=args.quick, keep=args.keep)


if __name__ == "__main__":
    main()
