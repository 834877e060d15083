"""Two trees of jaxpage on the same jobs, interleaved: is the new one as fast as the old one?

    python -m benchmarks.speed.two_builds OLD_TREE NEW_TREE --rounds 5   ten minutes, SmolLM2
    python -m benchmarks.speed.two_builds OLD_TREE NEW_TREE --quick      a few tokens a job

A tree is a checkout with its native kernels built. A round is, for each tree in turn, the jobs of
`two_builds_worker` in a process of its own, then two starts of the command line: one with an empty
cache, one with the cache that it left. Every other round begins with the new tree. The workers of
a tree share a cache, which one before the first round has filled.

A ratio is of the two runs of one round, the right way up: over 1, the new tree is faster or has
fewer. Exit status 1 where the median of a ratio is under 0.98.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import first_line, save, table
from benchmarks.common.sharegpt import load_sample, quick_sample
from benchmarks.common.timing import Spread
from benchmarks.common.trees import environment, run_in_tree
from benchmarks.speed import two_builds_worker as worker
from benchmarks.speed.jobs import MODEL, PREFILL_TOKENS, context

LEAST_RATIO = 0.98
STREAM_CONTEXT, STREAM_TOKENS = 128, 64


class Figure(NamedTuple):
    """One thing that is measured."""

    title: str
    is_rate: bool
    """Whether more is better."""


FIGURES = {
    "batch": Figure("batch of 16, tokens/s", True),
    "stream": Figure("one stream, tokens/s", True),
    "prefill": Figure("prefill, tokens/s", True),
    "host": Figure("host, ms a step of the batch", False),
    "programs": Figure("programs of a mixed job", False),
    "cold_s": Figure("start, cold, s to the first token", False),
    "warm_s": Figure("start, warm, s to the first token", False),
}
Rounds = list[dict[str, float]]
"""The figures of one tree, a table a round."""


def main() -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("new", type=Path, metavar="NEW_TREE")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--attention", default="native")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--no-starts", action="store_true", help="leave the cold and warm starts out"
    )
    parser.add_argument("--quick", action="store_true", help="a few tokens a job")
    args = parser.parse_args()
    job = make_job(args.model, args.attention, quick=args.quick)
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    found = measure(trees, job, rounds=args.rounds, has_starts=not args.no_starts)
    ratios = {name: ratio(name, found["old"], found["new"]) for name in found["old"][0]}
    record = {
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "rounds": found,
        "ratios": {name: spread.values for name, spread in ratios.items()},
    }
    save("two_builds", record, lines=report_lines(found, ratios), is_quick=args.quick)
    slower = [FIGURES[name].title for name, spread in ratios.items() if is_slower(spread)]
    print(f"under {LEAST_RATIO}: {'; '.join(slower) or 'none'}")
    return 1 if slower else 0


def make_job(model: str, attention: str, *, quick: bool) -> dict[str, Any]:
    """What a worker is told."""
    items = quick_sample() if quick else load_sample(16)
    return {
        "model": model,
        "attention": attention,
        "kv_memory": "16MiB" if quick else "2GiB",
        "prompts": [item.prompt for item in items],
        "lengths": [item.output_tokens for item in items],
        "long_prompt": context(32 if quick else PREFILL_TOKENS),
        "stream_prompt": context(16 if quick else STREAM_CONTEXT),
        "stream_tokens": 4 if quick else STREAM_TOKENS,
        "repeats": 1 if quick else 3,
    }


def measure(
    trees: Mapping[str, Path], job: dict[str, Any], *, rounds: int, has_starts: bool
) -> dict[str, Rounds]:
    """Every figure of both trees, round by round."""
    found: dict[str, Rounds] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as caches:
        for name, tree in trees.items():  # the first worker compiles
            run_in_tree(tree, worker.__file__, job | {"repeats": 1}, cache=f"{caches}/{name}")
        for number in range(rounds):
            order = list(trees) if number % 2 == 0 else list(trees)[::-1]
            for name in order:
                tree, cache = trees[name], f"{caches}/{name}"
                figures = run_in_tree(tree, worker.__file__, job, cache=cache)["figures"]
                found[name].append(figures | (starts(tree, job["model"]) if has_starts else {}))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def starts(tree: Path, model: str) -> dict[str, float]:
    """Seconds to the first token of two starts, of which only the first one compiles."""
    with tempfile.TemporaryDirectory() as cache:
        return {name: first_token_seconds(tree, cache, model) for name in ("cold_s", "warm_s")}


def first_token_seconds(tree: Path, cache: str, model: str) -> float:
    """Seconds from starting the command line to the first byte of text."""
    command = [sys.executable, "-u", "-m", "jaxpage.generate", "hi", "--max-tokens", "4"]
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, "--quiet", "--model", model],
        stdout=subprocess.PIPE, cwd=tree, env=environment(tree, cache=cache),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"error: the command line of {tree} ended with {process.returncode}")
    return seconds


def ratio(name: str, old: Rounds, new: Rounds) -> Spread:
    """A figure's ratio in each round; over 1 the new tree is better."""
    before, after = (Spread(tuple(figures[name] for figures in each)) for each in (old, new))
    return after / before if FIGURES[name].is_rate else before / after


def is_slower(ratios: Spread) -> bool:
    return ratios.median < LEAST_RATIO


def report_lines(found: dict[str, Rounds], ratios: dict[str, Spread]) -> list[str]:
    """A Markdown table of medians, with the least and the most."""
    rows = []
    for name, spread in ratios.items():
        old, new = (Spread(tuple(each[name] for each in found[tree])) for tree in ("old", "new"))
        told = f"{spread.median:.3f} ({min(spread.values):.3f} to {max(spread.values):.3f})"
        rows.append((FIGURES[name].title, old, new, told))
    return table(("", "old", "new", "ratio, over 1: the new one is better"), rows)


def commit(tree: Path) -> str:
    call = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
