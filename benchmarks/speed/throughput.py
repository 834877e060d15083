"""Batched throughput, single stream and prefill: jaxpage beside Transformers, interleaved.

    python -m benchmarks.speed.throughput              the 16-request sample, three rounds
    python -m benchmarks.speed.throughput --sample 64  the 64-request sample, one round
    python -m benchmarks.speed.throughput --quick      seconds: a few tokens, no peer

Both run the same float32 weights on the same threads, outputs forced to the recorded lengths.
Transformers is the worker `transformers_static`, on a folder that is written for the run. Then the
least time that a decode step can take on this machine, and what the engine counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.hf_folder import write_hf_folder
from benchmarks.common.report import first_line, save
from benchmarks.speed.jobs import (
    MODEL,
    Contestant,
    Job,
    Worker,
    measure,
    quick_jobs,
    rate_lines,
    sample_jobs,
)
from benchmarks.speed.roofline import measure_floors, model_floors
from benchmarks.speed.workers import protocol
from benchmarks.speed.workers.ours import Ours


class Here:
    """jaxpage in this process, so that its counters can be asked."""

    name = "ours"

    def __init__(self, model: str) -> None:
        self.engine = Ours(model)
        self.about = self.engine.about
        self.peak_bytes = 0
        self.stats: dict[str, Any] = {}
        """After the last batch, so of the batches alone."""

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        figures = protocol.run(self.engine, request)
        self.peak_bytes = max(self.peak_bytes, figures["peak_bytes"])
        if request["job"] == "batch":
            self.stats = self.engine.llm.stats().to_dict()
        return figures

    def close(self) -> None:
        self.engine.llm.close()


def main() -> None:
    args = _arguments()
    rounds = args.rounds or (1 if args.sample == 64 or args.quick else 3)
    jobs = quick_jobs() if args.quick else sample_jobs(args.model, args.sample)
    ours = Here(args.model)
    engines: list[Contestant] = [ours]
    with tempfile.TemporaryDirectory() as folder:
        if not (args.quick or args.no_peer):
            peer_model = write_hf_folder(args.model, Path(folder) / "hf")
            engines.append(Worker("transformers_static", sys.executable, str(peer_model)))
        record = measure(engines, jobs, rounds=rounds)
    record["stats"] = ours.stats
    record["floors"] = model_floors(ours.engine.llm.config, **measure_floors(quick=args.quick))
    lines = report_lines(record, jobs[0])
    save(f"throughput_{args.sample}", record, lines=lines, is_quick=args.quick)


def report_lines(record: dict[str, Any], batch: Job) -> list[str]:
    """What was run, rates, floors and counters."""
    prompts = batch.request["prompts"]
    return [
        f"{len(prompts)} requests, {sum(map(len, prompts))} prompt tokens, "
        f"{batch.num_tokens} output tokens, float32",
        "",
        *rate_lines(record),
        "",
        "Floors of a decode step on this machine:",
        "",
        *[f"- {line}" for line in record["floors"]["lines"]],
        "",
        f"The engine over the batches: {record['stats']}",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sample", type=int, choices=(16, 64), default=16)
    parser.add_argument("--rounds", type=int, default=None, help="3 for sample 16, 1 for 64")
    parser.add_argument("--quick", action="store_true", help="a few tokens, no peer")
    parser.add_argument("--no-peer", action="store_true", help="jaxpage alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
