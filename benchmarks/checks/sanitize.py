"""The native kernels under sanitizers: random calls, as XLA makes them, on every instruction set.

    python -m benchmarks.checks.sanitize --rounds 4000         thousands of rounds under each
    python -m benchmarks.checks.sanitize --kinds plain --compiler clang++   as shipped, by another

tests/native/kernels_test.cpp makes the calls, on pools of 0, 1, 2 and 5 threads and two at a time,
and holds them to double precision within stated bounds, and to the bit against the same rows in
another batch. address finds what is read or written out of bounds and undefined behaviour, thread
finds races; plain is compiled as the package is. First each sanitizer has to find the faults that
are seeded for it. The exit code is 1 where one is not found, or anything is found beside them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setup import CALLS, FLAGS, HERE, SETS, SOURCES

TESTS = Path("tests/native")


class Kind(NamedTuple):
    """Flags of a build, and the faults seeded for it with what it says of each."""

    flags: tuple[str, ...]
    faults: dict[str, str]


SANITIZED = ("-O1", "-g1", "-fno-sanitize-recover=all")
KINDS = {
    "address": Kind(
        (*SANITIZED, "-fsanitize=address,undefined"),
        {"read": "heap-buffer-overflow", "misaligned": "misaligned address"},
    ),
    "thread": Kind((*SANITIZED, "-fsanitize=thread"), {"race": "data race"}),
    "plain": Kind((), {}),
}


def main() -> int:
    args = _arguments()
    failed = 0
    for name in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            program = build(KINDS[name], args.compiler, Path(folder))
            print(f"{name}: built with {args.compiler} in {time.monotonic() - began:.0f} s")
            failed += not seeded_faults_are_found(program, KINDS[name])
            failed += not rounds_are_clean(program, args.rounds, args.seed)
    return 1 if failed else 0


def build(kind: Kind, compiler: str, folder: Path) -> Path:
    """The program of one kind, its sources compiled on all processors."""
    flags = [compiler, *FLAGS, *kind.flags]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(flags, *job), _jobs(folder)))
    program = folder / "kernels_test"
    command = [*flags, *map(str, objects), "-pthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def seeded_faults_are_found(program: Path, kind: Kind) -> bool:
    """Whether the sanitizer says of each of its faults what it is."""
    found = []
    for fault, word in kind.faults.items():
        done = subprocess.run([program, fault], capture_output=True, text=True)
        found.append(done.returncode != 0 and word in done.stderr)
        print(f"  seeded fault {fault}: {'found' if found[-1] else 'NOT FOUND'}")
    return all(found)


def rounds_are_clean(program: Path, rounds: int, seed: int) -> bool:
    """Whether `rounds` rounds find nothing; what they print goes to the terminal."""
    began = time.monotonic()
    done = subprocess.run([program, str(rounds), str(seed)], stderr=subprocess.STDOUT)
    findings = "no finding" if done.returncode == 0 else "FOUND, see above"
    print(f"  {findings}, {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


def _jobs(folder: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """(source, object, flags) of all there is to compile, what takes longest first."""
    for name, flags in reversed(SETS.items()):
        for source in SOURCES:
            yield HERE / source, folder / f"{name}_{source}.o", [*flags, f"-DJAXPAGE_SET={name}"]
    yield TESTS / "kernels_test.cpp", folder / "kernels_test.o", []
    for source in CALLS:
        yield HERE / source, folder / f"{source}.o", []


def _compile(flags: list[str], source: Path, target: Path, more: list[str]) -> Path:
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None and jaxlib.origin is not None
    headers = ["-isystem", str(Path(jaxlib.origin).parent / "include"), f"-I{HERE}", f"-I{TESTS}"]
    command = [*flags, *more, *headers, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The native kernels under sanitizers.")
    parser.add_argument("--rounds", type=int, default=400, help="of each kind and instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["address", "thread"])
    parser.add_argument("--compiler", default="g++")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
