"""Damages the files of every reader, by the thousand.

    python -m benchmarks.checks.fuzz --count 30000

Each input must be read or refused in one line. Prints counts by reader and outcome, and for each
fault the call that shows it again; exits with 1 when there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.harness import FAULTS, FINE, Outcome, all_targets, run_all

_EVERY = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.checks.fuzz")
    parser.add_argument("--count", type=int, default=1000, help="inputs over all readers together")
    parser.add_argument("--seed", type=int, default=1, help="the first of as many seeds")
    parser.add_argument("--target", action="append", help="only this reader; may be repeated")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    names = options.target or sorted(all_targets())
    jobs = [(names[i % len(names)], options.seed + i // len(names)) for i in range(options.count)]
    began = time.perf_counter()
    counts: Counter[tuple[str, str]] = Counter()
    for done, outcome in enumerate(run_all(jobs, num_workers=options.workers), 1):
        counts[outcome.target, outcome.kind] += 1
        if outcome.kind in FAULTS or options.count == 1:
            _show(outcome)
        if done % _EVERY == 0:
            print(f"{done} inputs, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    _print_table(names, counts)
    num_faults = sum(counts[name, kind] for name in names for kind in FAULTS)
    print(
        f"seeds {jobs[0][1]}..{jobs[-1][1]}, {len(jobs)} inputs, {num_faults} faults, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 1 if num_faults else 0


def _show(outcome: Outcome) -> None:
    print(
        f"{outcome.kind} after {outcome.seconds:.1f} s: python -m benchmarks.checks.fuzz --count 1 "
        f"--target {outcome.target} --seed {outcome.seed}\n{outcome.detail}",
        flush=True,
    )


def _print_table(names: list[str], counts: Counter[tuple[str, str]]) -> None:
    kinds = (*FINE, *FAULTS)
    print("| reader | " + " | ".join(kinds) + " |")
    print("|---|" + "---:|" * len(kinds))
    for name in names:
        print(f"| {name} | " + " | ".join(str(counts[name, kind]) for kind in kinds) + " |")


if __name__ == "__main__":
    sys.exit(main())
