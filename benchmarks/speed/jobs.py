"""The jobs that engines are compared at, the rounds in which they take turns, and the rates."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.common.report import table
from benchmarks.common.sharegpt import load_sample
from benchmarks.common.timing import Disturbed, Spread

MODEL = "smollm2-135m"
PREFILL_TOKENS = 512
STREAM_TOKENS = 64
STREAM_CONTEXTS = (128, 1024)


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to run, and how many tokens a second are counted by."""

    name: str
    request: dict[str, Any]
    num_tokens: int


class Contestant(Protocol):
    """An engine that is given jobs (see workers/protocol.py)."""

    name: str
    about: str
    peak_bytes: int

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The figures of one job. Raises Disturbed where they mean nothing."""
        ...

    def close(self) -> None: ...


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.speed.workers.{name}", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.about: str = self._reply()["about"]
        self.peak_bytes = 0

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The figures of one job. Raises RuntimeError when the engine died, Disturbed as told."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        figures = self._reply()
        if "error" in figures:
            raise Disturbed(figures["error"])
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


def sample_jobs(model: str, sample: int, *, batch_only: bool = False) -> list[Job]:
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
    """A few tokens of each kind of job."""
    batch = {"job": "batch", "prompts": [[1, 5, 9], [1, 7]], "lengths": [3, 4]}
    return [
        Job("batch", batch, 7),
        Job("stream", {"job": "stream", "prompt": [1, 5, 9], "new_tokens": 3}, 3),
        Job("prefill", {"job": "prefill", "prompt": [1, 5, 9]}, 3),
    ]


def context(num_tokens: int) -> list[int]:
    """A prompt of that many ids; which ones does not matter to speed."""
    return [100 + 7 * i % 397 for i in range(num_tokens)]


def measure(engines: list[Contestant], jobs: list[Job], *, rounds: int) -> dict[str, Any]:
    """Every job on every engine, one after another, `rounds` times after one that warms up.

    An engine that was disturbed at a job has no rate there: the reason stands in its place.
    """
    rates: dict[str, dict[str, list[float]]] = {job.name: {} for job in jobs}
    disturbed: dict[str, dict[str, str]] = {}
    first: dict[str, list[float]] = {}
    for job in jobs:
        running = list(engines)
        for is_warm in (False, *[True] * rounds):
            for engine in list(running):
                try:
                    figures = engine.run(job.request)
                except Disturbed as error:
                    disturbed.setdefault(job.name, {})[engine.name] = str(error)
                    rates[job.name].pop(engine.name, None)
                    running.remove(engine)
                    continue
                if is_warm:
                    rate = job.num_tokens / figures["seconds"]
                    rates[job.name].setdefault(engine.name, []).append(rate)
                    if figures.get("first_token_s"):
                        first[engine.name] = sorted(figures["first_token_s"])
    for engine in engines:
        engine.close()
    return {
        "about": {engine.name: engine.about for engine in engines},
        "rounds": rounds,
        "tokens_per_second": rates,
        "not_measurable": disturbed,
        "requests": {job.name: len(job.request.get("prompts", [0])) for job in jobs},
        "tokens": {job.name: job.num_tokens for job in jobs},
        "first_token_s": first,
        "peak_bytes": {engine.name: engine.peak_bytes for engine in engines},
    }


def rate_lines(record: dict[str, Any]) -> list[str]:
    """Tokens per second and, beside each peer, jaxpage over it in the same rounds."""
    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    for job, figures in record["tokens_per_second"].items():
        ours = figures.get("ours")
        for name, rates in figures.items():
            spread = Spread(tuple(rates))
            ratio = Spread(tuple(ours)) / spread if ours and name != "ours" else ""
            rows.append((job, name, str(spread), str(ratio)))
        for name, why in record["not_measurable"].get(job, {}).items():
            rows.append((job, name, "not measurable", ""))
            reasons.append(f"- {job}, {name}: not measurable: {why}")
    head = "tokens/s: median (least to most); ratio: jaxpage over the peer, same rounds"
    lines = [head, "", *table(("job", "engine", "tokens/s", "ratio"), rows)]
    return [*lines, "", *reasons] if reasons else lines
