"""Timed arrivals on the real engine: who came when, got a first token when, was done when."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sim.lengths import Job
from benchmarks.sim.outcome import percentile
from jaxpage import LLM, SamplingParams


@dataclass(slots=True)
class Served:
    """What a run on the real engine measured; seconds are wall time."""

    jobs: Seq[Job]
    seconds: float = 0.0
    first_s: dict[int, float] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    errors: int = 0
    wrong_lengths: int = 0
    window_tokens: int = 0
    """Output tokens of requests that ended before the last arrival."""
    memory_bytes: list[int] = field(default_factory=list)
    """Peak resident size so far, at a tenth of the run each."""
    free_blocks: tuple[float, float] = (0, 0)
    """Before the first request and after the last."""
    stats: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Percentiles in seconds, and what was lost."""
        waits = [self.first_s[i] - self.jobs[i].arrival_s for i in self.first_s]
        whole = [self.finish_s[i] - self.jobs[i].arrival_s for i in self.finish_s]
        between = [
            (self.finish_s[i] - self.first_s[i]) / (self.jobs[i].output - 1)
            for i in self.finish_s
            if i in self.first_s and self.jobs[i].output > 1
        ]
        tokens = sum(self.jobs[i].output for i in self.finish_s)
        normalised = [x / self.jobs[i].output for x, i in zip(whole, self.finish_s, strict=True)]
        found: dict[str, Any] = {
            "requests": len(self.jobs),
            "lost": len(self.jobs) - len(self.finish_s) - self.errors,
            "errors": self.errors,
            "wrong_lengths": self.wrong_lengths,
            "tokens_per_s": tokens / self.seconds,
            "worst_over_median": max(normalised) / percentile(normalised, 0.5),
        }
        for name, values in (("ttft", waits), ("per_token", between), ("latency", whole)):
            for share in (50, 90, 99):
                found[f"{name}_p{share}_s"] = percentile(values, share / 100)
        return found


def serve(llm: LLM, jobs: Seq[Job]) -> Served:
    """Adds each job at its time and runs the engine until all have ended."""
    served, engine, place = Served(jobs), llm.engine, 0
    blocks_before = engine.stats().to_dict().get("blocks_free", 0)
    start = time.perf_counter()
    marks = [len(jobs) * tenth // 10 for tenth in range(1, 11)]
    while place < len(jobs) or engine.has_unfinished:
        now = time.perf_counter() - start
        while place < len(jobs) and jobs[place].arrival_s <= now:
            _add(llm, place, jobs[place])
            place += 1
        if not engine.has_unfinished:
            time.sleep(min(1e-3, max(jobs[place].arrival_s - now, 0.0)))
            continue
        for output in engine.step():
            _note(served, output, time.perf_counter() - start, is_open=place < len(jobs))
        while marks and len(served.finish_s) >= marks[0]:
            served.memory_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            marks.pop(0)
    served.seconds = time.perf_counter() - start
    served.stats = engine.stats().to_dict()
    served.free_blocks = (blocks_before, served.stats.get("blocks_free", 0))
    return served


def capacity(llm: LLM, jobs: Seq[Job]) -> float:
    """Requests a second with all of them waiting from the start; runs once before, to compile."""
    at_once = [Job(job.prompt, job.output) for job in jobs]
    serve(llm, at_once)
    return len(jobs) / serve(llm, at_once).seconds


def _add(llm: LLM, index: int, job: Job) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True)
    vocabulary = llm.config.vocab_size - 10
    prompt = [5 + (31 * index + 7 * i) % vocabulary for i in range(job.prompt)]
    llm.engine.add_request(f"live-{index}", prompt, params)


def _note(served: Served, output: Any, now: float, *, is_open: bool) -> None:
    index = int(output.request_id.rpartition("-")[2])
    if output.error is not None:
        served.errors += 1
        return
    if output.outputs and output.outputs[0].token_ids:
        served.first_s.setdefault(index, now)
    if output.finished:
        served.finish_s[index] = now
        tokens = len(output.outputs[0].token_ids)
        served.wrong_lengths += tokens != served.jobs[index].output
        served.window_tokens += tokens * is_open
