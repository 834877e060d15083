"""Exceptions at random places of the engine, and whether the LLM is as good as new after each.

    python -m benchmarks.checks.interrupts --interrupts 10000 --errors 10000 --seed 1

Interrupts come between any two instructions or lines of a call, a third of them again while the
first one is cleaned up; errors come once, or whenever their place is reached. Calls are of every
kind (see tests/engine/injection.py), on the tiny model in a pool too small for them. After each the
blocks, books, swap space and arrays are checked, and ids compared with a clean LLM's. Prints counts
by kind, outcome and place; exits with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from types import FrameType

from benchmarks.common.report import first_line
from tests.engine.injection import Attack, Bench, conditions, random_attack

MOST_SECONDS = 30
"""Of one attack: what takes longer hangs."""
CHECK_EVERY = 50
TELL_EVERY = 1000


class Hang(BaseException):
    """An attack that does not end."""


class Tally:
    """What came of all attacks."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.places: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, bench: Bench, attack: Attack, *, checks_size: bool) -> None:
        signal.alarm(MOST_SECONDS)
        try:
            places, outcome = bench.attack(attack)
            if checks_size:
                bench.check_size()
        except BaseException as error:  # noqa: BLE001  # an interrupt that leaked is a fault too
            signal.alarm(0)
            self.faults.append("".join(traceback.format_exception(error))[-3000:])
            print("FAULT", attack, self.faults[-1], flush=True)
            bench.build()
            return
        signal.alarm(0)
        self.outcomes[attack.name, attack.kind, outcome] += 1
        self.places.update(place.rpartition(":")[0] for place in places[:2])

    def print(self) -> None:
        print(f"{'attack':20} {'call':16} outcome")
        for (name, kind, outcome), count in sorted(self.outcomes.items()):
            print(f"{name:20} {kind:16} {outcome:28} {count:6}")
        print(f"{len(self.places)} functions; those hit most:")
        for place, count in self.places.most_common(40):
            print(f"{count:6} {place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--interrupts", type=int, default=300)
    parser.add_argument("--errors", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    rng, tally, start = random.Random(args.seed), Tally(), time.perf_counter()
    attacks = [True] * args.interrupts + [False] * args.errors
    rng.shuffle(attacks)
    for number, options in enumerate(conditions()):
        bench = Bench(**options)
        before = _resident_bytes()
        mine = attacks[number :: len(conditions())]
        for index, is_interrupt in enumerate(mine):
            attack = random_attack(bench, rng, is_interrupt=is_interrupt)
            tally.run(bench, attack, checks_size=index % CHECK_EVERY == 0)
            if index % TELL_EVERY == TELL_EVERY - 1:
                print(f"{options}: {index + 1} of {len(mine)}, {len(tally.faults)} faults")
        grown = _resident_bytes() - before
        print(f"{options}: {len(mine)} attacks, memory grew by {grown / 2**20:.0f} MiB")
    tally.print()
    seconds = time.perf_counter() - start
    print(f"seed {args.seed}: {args.interrupts} interrupts, {args.errors} errors, "
          f"{len(tally.faults)} faults, {seconds:.0f} s")  # fmt: skip
    return int(bool(tally.faults))


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"longer than {MOST_SECONDS} s")


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
