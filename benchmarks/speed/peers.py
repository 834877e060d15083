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
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import Spread, first_line, save
from benchmarks.common.sharegpt import load_sample
from benchmarks.speed.throughput import MODEL, STREAM_CONTEXTS, STREAM_TOKENS, context

WORKERS = Path(__file__).parent / "workers"
PEERS = tuple(sorted(p.stem for p in WORKERS.glob("*_*.py") if p.stem != "__init__"))
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to run, and how many tokens a second are counted by."""

    name: str
    request: dict[str, Any]
    num_tokens: int


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self.name = name
        module = WORKERS / f"{name}.py"
        command = [python, str(module), model]
        if name == "ours":
            command = [python, "-m", "benchmarks.speed.workers.ours", model]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.about: str = self._reply()["about"]
        self.peak_bytes = 0

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The figures of one job. Raises RuntimeError when the engine died or was disturbed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        figures = self._reply()
        if "error" in figures:
            raise RuntimeError(f"{self.name}, {request['job']}: {figures['error']}")
        self.peak_bytes = max(self.peak_bytes, figures["peak_bytes"])
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; run it by hand")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default=MODEL, help="what jaxpage runs")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON:MODEL")
    parser.add_argument("--sample", type=int, choices=(16, 64), default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-only", action="store_true", help="no single stream, no prefill")
    parser.add_argument("--quick", action="store_true", help="jaxpage alone on a few tokens")
    args = parser.parse_args()
    jobs = quick_jobs() if args.quick else real_jobs(args.model, args.sample, args.batch_only)
    workers = [Worker("ours", sys.executable, args.model)]
    missing = dict.fromkeys(PEERS, "not named in this run")
    for spec in args.peer:
        name, _, place = spec.partition("=")
        python, _, model = place.partition(":")
        if name not in PEERS or not model:
            parser.error(f"got --peer {spec}, wanted one of {', '.join(PEERS)} =PYTHON:MODEL")
        try:
            workers.append(Worker(name, python, model))
            del missing[name]
        except RuntimeError as error:
            missing[name] = str(error)
    record = measure(workers, jobs, rounds=1 if args.quick else args.rounds)
    record["missing"] = missing
    print_table(record)
    print("wrote", save(f"peers_{'quick' if args.quick else args.sample}", record))


def real_jobs(model: str, sample: int, batch_only: bool) -> list[Job]:
    """The ShareGPT sample as one batch, then a stream at two contexts and a prefill."""
    import jaxpage

    tokenizer = jaxpage.load(model)[2]
    assert tokenizer is not None, "the prompts are text"
    items = load_sample(sample)
    prompts = [list(tokenizer.encode(item.prompt)) for item in items]
    lengths = [item.output_tokens for item in items]
    batch = {"job": "batch", "prompts": prompts, "lengths": lengths}
    jobs = [Job(f"batch of {sample}", batch, sum(lengths))]
    if batch_only:
        return jobs
    for size in STREAM_CONTEXTS:
        stream = {"job": "stream", "prompt": context(size), "new_tokens": STREAM_TOKENS}
        jobs.append(Job(f"stream at {size}", stream, STREAM_TOKENS))
    prefill = {"job": "prefill", "prompt": context(PREFILL_TOKENS)}
    return [*jobs, Job(f"prefill {PREFILL_TOKENS}", prefill, PREFILL_TOKENS)]


def quick_jobs() -> list[Job]:
    batch = {"job": "batch", "prompts": [[1, 5, 9], [1, 7]], "lengths": [3, 4]}
    return [
        Job("batch", batch, 7),
        Job("stream", {"job": "stream", "prompt": [1, 5, 9], "new_tokens": 3}, 3),
        Job("prefill", {"job": "prefill", "prompt": [1, 5, 9]}, 3),
    ]


def measure(workers: list[Worker], jobs: list[Job], *, rounds: int) -> dict[str, Any]:
    """Every job on every engine, one after another, `rounds` times after one that warms up."""
    rates: dict[str, dict[str, list[float]]] = {job.name: {} for job in jobs}
    first: dict[str, list[float]] = {}
    for job in jobs:
        for worker in workers:
            worker.run(job.request)
        for _ in range(rounds):
            for worker in workers:
                figures = worker.run(job.request)
                rate = job.num_tokens / figures["seconds"]
                rates[job.name].setdefault(worker.name, []).append(rate)
                if figures.get("first_token_s"):
                    first[worker.name] = sorted(figures["first_token_s"])
    for worker in workers:
        worker.close()
    return {
        "about": {worker.name: worker.about for worker in workers},
        "tokens_per_second": rates,
        "requests": {job.name: len(job.request.get("prompts", [0])) for job in jobs},
        "tokens": {job.name: job.num_tokens for job in jobs},
        "first_token_s": first,
        "peak_bytes": {worker.name: worker.peak_bytes for worker in workers},
    }


def print_table(record: dict[str, Any]) -> None:
    """Tokens per second and, beside each peer, jaxpage over it in the same rounds."""
    for name, about in record["about"].items():
        print(f"- {name}: {about}")
    for name, why in record["missing"].items():
        print(f"- {name}: missing: {why}")
    print("\ntokens/s: median (least to most); ratio: jaxpage over the peer, same rounds\n")
    print("| job | engine | tokens/s | ratio |\n|---|---|---|---|")
    for job, figures in record["tokens_per_second"].items():
        ours = Spread(tuple(figures["ours"]))
        for name, rates in figures.items():
            spread = Spread(tuple(rates))
            print(f"| {job} | {name} | {spread} | {'' if name == 'ours' else ours / spread} |")
    print("\n| engine | requests/s of the batch | first token, s: median (last) | peak memory |")
    print("|---|---|---|---|")
    job, figures = next(iter(record["tokens_per_second"].items()))
    for name, rates in figures.items():
        per_s = Spread(tuple(rates)).median / record["tokens"][job] * record["requests"][job]
        first = record["first_token_s"].get(name)
        told = f"{first[len(first) // 2]:.2f} ({first[-1]:.2f})" if first else "not told"
        print(f"| {name} | {per_s:.2f} | {told} | {record['peak_bytes'][name] / 2**30:.2f} GiB |")


if __name__ == "__main__":
    main()
