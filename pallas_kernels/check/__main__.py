"""Compiles the kernels for each target, prints a table, exits 1 if a rule is broken."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pallas_kernels.check.cards import CARDS
from pallas_kernels.check.cost import CONSTANTS
from pallas_kernels.check.faults import FAULTS
from pallas_kernels.check.report import print_rules, print_target
from pallas_kernels.check.tune import print_candidates

TIMEOUT_S = 3600
"""Most seconds for one target: whole models, on a machine that has other work."""


def main() -> int:
    """1: a rule is broken or a compiler failed; 0: all rules hold."""
    arguments = _parse()
    if arguments.tune:
        for target in arguments.target:
            print_candidates(CARDS[target], only=arguments.only)
        return 0
    results = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(partial(run_target, arguments=arguments), arguments.target)
        for target, rows in zip(arguments.target, found, strict=True):
            results[target] = rows
            print_target(CARDS[target], rows)
    print(f"\nModel: {CONSTANTS}.\n")
    failed = print_rules(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 1 if failed else 0


def run_target(target: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is reported of each program of one target, compiled in a process of its own."""
    work = {
        "target": target,
        "programs": arguments.program,
        "fault": arguments.seed_fault,
        "only": arguments.only,
    }
    with TemporaryDirectory() as place:
        path = Path(place, "rows.json")
        command = [sys.executable, "-m", "pallas_kernels.check.worker", json.dumps(work), str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if done.returncode or not rows:
        what = "\n".join(done.stderr.strip().splitlines()[-12:]) or "no program matches"
        rows.append({"program": "compiler", "breaches": [{"rule": "compiles", "what": what}]})
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.check", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=CARDS, default=list(CARDS), metavar="CARD")
    parser.add_argument(
        "--program",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="check what this returns for a Card (a Program or a list) instead of the kernels",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name matches")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="cards compiled for at once"
    )
    parser.add_argument("--seed-fault", choices=FAULTS, help="compile a known mistake: must exit 1")
    parser.add_argument("--tune", action="store_true", help="compare tiles by the cost model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows are kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
