"""The same tokens and log-probabilities from two trees of jaxpage, to the bit, on a CPU.

    python -m benchmarks.checks.same_bits OLD_TREE NEW_TREE              200 requests, minutes
    python -m benchmarks.checks.same_bits TREE TREE --seed-difference    must end with 1

A tree is a checkout with its native kernels built. Each one answers the same mixed requests, in
processes of its own with its own cache of programs, through every engine of `same_bits_worker`:
attention native, xla and reference, two block sizes, prefix cache on and off, pools so small that
requests give way by recompute and by swap, float32 and bfloat16, the tiny model and SmolLM2.

Compared are prompts, tokens, texts, reasons of the end, cached tokens and every log-probability:
summed, of each token, of its alternatives, of the prompt. Exit status 1 where one of them differs,
and where what an engine is there to show (preemption, prefix hits) never happened.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks import same_bits_worker as worker
from benchmarks.common.report import first_line, table
from benchmarks.common.trees import run_in_tree

COUNTERS = ("num_steps", "prefix_hit_tokens", "preemptions_recompute", "preemptions_swap")
HEADER = ("engine", "requests", "tokens", "log-probabilities", "differences", *COUNTERS)
LOGPROB_KEYS = ("cumulative_logprob", "score", "logprobs", "prompt_logprobs")
Requests = dict[str, Any]
"""Each request's record, as the worker writes it, by the request's id."""
Answers = dict[str, Any]
"""What one engine's worker wrote: `requests`, and `stats`, its counters."""


@dataclass(slots=True)
class Tally:
    """What was compared, and what differs: a line each."""

    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    differences: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("new", type=Path, metavar="NEW_TREE")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--only", action="append", choices=worker.SETUPS, metavar="ENGINE", help="may be repeated"
    )
    parser.add_argument("--tiny", type=Path, help="folder of the tiny model; found in NEW_TREE")
    parser.add_argument(
        "--seed-difference", action="store_true", help="flip one bit of what the new tree said"
    )
    args = parser.parse_args()
    tiny = args.tiny or next(args.new.glob("tests/**/tiny/model"))
    job = {"tiny": str(tiny.resolve()), "requests": args.requests}
    start = time.perf_counter()
    tallies: dict[str, Tally] = {}
    faults: list[str] = []
    print(*table(HEADER, ()), sep="\n", flush=True)
    for name, old, new in run_trees((args.old, args.new), job, args.only or list(worker.SETUPS)):
        if args.seed_difference and not tallies:
            flip_a_bit(new["requests"])
        tallies[name] = compare(old["requests"], new["requests"])
        faults += [f"{name}: {line}" for line in tallies[name].differences]
        faults += not_shown(name, old) + not_shown(name, new)
        print(row(name, tallies[name], new["stats"]), flush=True)
    print(verdict(tallies, faults), f"({time.perf_counter() - start:.0f} s)")
    return 1 if faults else 0


def run_trees(
    trees: tuple[Path, Path], job: dict[str, Any], names: list[str]
) -> Iterator[tuple[str, Answers, Answers]]:
    """(engine, the old tree's answers, the new one's), both trees at once, engine by engine."""
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(len(trees)) as pool:
        for name in names:

            def run(number: int, name: str = name) -> Answers:
                asked = job | {"setup": name}
                return run_in_tree(
                    trees[number], worker.__file__, asked, cache=f"{caches}/{number}"
                )

            old, new = pool.map(run, range(len(trees)))
            yield name, old, new


def compare(old: Requests, new: Requests) -> Tally:
    """How much two sets of answers hold, and each place where they differ."""
    tally = Tally(requests=len(new))
    for request_id in sorted({*old, *new}, key=int):
        before, after = (dict(leaves(found.get(request_id))) for found in (old, new))
        for path in sorted({*before, *after}, key=str):
            was, now = before.get(path, "absent"), after.get(path, "absent")
            if type(was) is not type(now) or was != now:
                place = ".".join(map(str, path))
                tally.differences.append(f"request {request_id}, {place}: {was} was, {now} is")
        tally.tokens += sum("token_ids" in path[:-1] for path in after if "outputs" in path)
        tally.logprobs += sum(is_logprob(path, leaf) for path, leaf in after.items())
    return tally


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, leaf) of everything in a JSON value; an empty list or table is a leaf."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(each, (*path, key))


def is_logprob(path: tuple[str | int, ...], leaf: Any) -> bool:
    """Whether a leaf of a record is a float's bits; all other strings stand elsewhere."""
    return isinstance(leaf, str) and any(key in path for key in LOGPROB_KEYS)


def flip_a_bit(requests: Requests) -> None:
    """Moves one log-probability to the float32 beside it, so that a comparison must fail."""
    for record in requests.values():
        for output in record["outputs"]:
            for entry in output["logprobs"] or ():
                entry[1] = (float.fromhex(entry[1]) * (1 + 2**-23)).hex()
                return
    raise AssertionError("no request has log-probabilities")


def not_shown(name: str, answers: Answers) -> list[str]:
    """What an engine was to show and did not; a request that failed shows nothing either."""
    counter = worker.SETUPS[name].must_see
    found = [] if answers["stats"][counter] else [f"{name}: never seen: {counter}"]
    return found + [
        f"{name}: request {request_id} failed: {record['error']}"
        for request_id, record in answers["requests"].items()
        if record["error"] is not None
    ]


def row(name: str, tally: Tally, stats: dict[str, Any]) -> str:
    """An engine's line of the table."""
    counts = (tally.requests, tally.tokens, tally.logprobs, len(tally.differences))
    return table((), [(name, *counts, *(stats[counter] for counter in COUNTERS))])[-1]


def verdict(tallies: dict[str, Tally], faults: list[str]) -> str:
    """One line; the first fault where there is one."""
    if faults:
        return f"verdict: DIFFERENT, {len(faults)} places; the first: {faults[0]}"
    tokens, logprobs = (
        sum(getattr(t, n) for t in tallies.values()) for n in ("tokens", "logprobs")
    )
    return (
        f"verdict: equal to the bit: {len(tallies)} engines, {tokens} tokens, "
        f"{logprobs} log-probabilities"
    )


if __name__ == "__main__":
    sys.exit(main())
