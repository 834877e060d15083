"""Other engines on the same float32 weights, prompts and lengths: interleaved, in one run.

    python -m benchmarks.speed.peers --peer transformers_static=PYTHON:HF_FOLDER \\
        --peer openvino_continuous=PYTHON:IR_FOLDER --peer llama_cpp_slots=PYTHON:F32.gguf
    python -m benchmarks.speed.peers --quick      seconds: jaxpage alone on a few tokens

PYTHON is the interpreter of that engine's own environment; how to make it, and the model in its
form, stands at the top of benchmarks/speed/workers/NAME.py. A peer that is not named is not run,
and the table says so. Each engine lives in a process of its own that waits while others run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.timing import Spread
from benchmarks.speed.jobs import MODEL, Worker, measure, quick_jobs, rate_lines, sample_jobs

PEERS = tuple(sorted(p.stem for p in (Path(__file__).parent / "workers").glob("[!_]*_*.py")))


def main() -> None:
    args = _arguments()
    if args.quick:
        jobs = quick_jobs()
    else:
        jobs = sample_jobs(args.model, args.sample, batch_only=args.batch_only)
    workers = [Worker("ours", sys.executable, args.model)]
    missing = dict.fromkeys(PEERS, "not named in this run")
    for name, python, model in args.peer:
        try:
            workers.append(Worker(name, python, model))
            del missing[name]
        except RuntimeError as error:
            missing[name] = str(error)
    record = measure([*workers], jobs, rounds=1 if args.quick else args.rounds)
    record["missing"] = missing
    name = f"peers_{args.sample}"
    save(name, record, lines=report_lines(record), is_quick=args.quick)


def report_lines(record: dict[str, Any]) -> list[str]:
    """Each engine's name and version, rates, and what else the batch showed."""
    lines = [f"- {name}: {about}" for name, about in record["about"].items()]
    lines += [f"- {name}: missing: {why}" for name, why in record["missing"].items()]
    lines += ["", *rate_lines(record), ""]
    job, figures = next(iter(record["tokens_per_second"].items()))
    rows: list[tuple[str, ...]] = []
    for name, rates in figures.items():
        per_s = Spread(tuple(rates)).median / record["tokens"][job] * record["requests"][job]
        first = record["first_token_s"].get(name)
        told = f"{first[len(first) // 2]:.2f} ({first[-1]:.2f})" if first else "not told"
        rows.append((name, f"{per_s:.2f}", told, f"{record['peak_bytes'][name] / 2**30:.2f} GiB"))
    header = (
        "engine", "requests/s of the batch", "first token, s: median (last)", "peak memory",
    )  # fmt: skip
    return [*lines, *table(header, rows)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default=MODEL, help="what jaxpage runs")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON:MODEL")
    parser.add_argument("--sample", type=int, choices=(16, 64), default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-only", action="store_true", help="no single stream, no prefill")
    parser.add_argument("--quick", action="store_true", help="jaxpage alone on a few tokens")
    args = parser.parse_args()
    specs, args.peer = args.peer, []
    for spec in specs:
        name, _, place = spec.partition("=")
        python, _, model = place.partition(":")
        if name not in PEERS or not model:
            parser.error(f"got --peer {spec}, wanted one of {', '.join(PEERS)} =PYTHON:MODEL")
        args.peer.append((name, python, model))
    return args


if __name__ == "__main__":
    main()
