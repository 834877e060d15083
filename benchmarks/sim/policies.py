"""How the other systems admit and hold requests: reserved memory, static batches.

    orca_*        iteration-level; a buddy chunk for the prompt and the output that is reserved
    tgi           iteration-level; a token budget, prompt and most output reserved exactly
    faster        dynamic batches: what waits, up to the reserved maximum's count; held to the end
    transformers  static batches, padded to the longest prompt and output; KV copied each step

None of them shares the prompt's KV between samples: n samples are n reservations.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.sim.buddy import Buddy, chunk_of
from benchmarks.sim.cost import Site
from benchmarks.sim.lengths import MAX_TOKENS, Job
from benchmarks.sim.outcome import Meter, Outcome


class Memory(Protocol):
    """Where reservations come from."""

    def try_take(self, size: int) -> tuple[int, int] | None: ...

    def give_back(self, start: int, size: int) -> None: ...


class Budget:
    """Slots without places: only their number counts."""

    def __init__(self, size: int) -> None:
        self.left = size

    def try_take(self, size: int) -> tuple[int, int] | None:
        if size > self.left:
            return None
        self.left -= size
        return 0, size

    def give_back(self, start: int, size: int) -> None:
        self.left += size


def orca(site: Site, jobs: Seq[Job], kind: str, *, drained: bool = True) -> Outcome:
    """`kind`: max, pow2 or oracle. `drained=False` stops when nothing waits any more."""
    sizes: dict[str, Callable[[Job], int]] = {
        "max": lambda job: MAX_TOKENS,
        "pow2": lambda job: min(job.prompt + chunk_of(job.output), MAX_TOKENS),
        "oracle": lambda job: job.prompt + job.output,
    }
    return _Iterations(site, jobs, Buddy(site.slots), sizes[kind]).run(drained)


def tgi(site: Site, jobs: Seq[Job]) -> Outcome:
    """Prompt and output reserved exactly."""
    return reserving(site, jobs, answer=0)


def reserving(site: Site, jobs: Seq[Job], *, answer: int) -> Outcome:
    """As `tgi`, with room for an answer of so many tokens, or of the output where that is more."""

    def size(job: Job) -> int:
        return min(job.prompt + max(job.output, answer), MAX_TOKENS)

    return _Iterations(site, jobs, Budget(site.slots), size).run(drained=True)


def copying(site: Site, jobs: Seq[Job]) -> Outcome:
    """As `tgi`, with a KV cache that is copied to grow."""
    return tgi(_with_copies(site), jobs)


@dataclass(slots=True)
class _Live:
    """Sequences in flight that began in the same iteration's admission."""

    job: int
    held: list[tuple[int, int]]


class _Iterations:
    """Iteration-level batching over reservations: every step admits what fits, in order."""

    def __init__(
        self, site: Site, jobs: Seq[Job], memory: Memory, size: Callable[[Job], int]
    ) -> None:
        self.site, self.jobs, self.memory, self.size = site, jobs, memory, size
        self.next = 0
        self.clock = 0.0
        self.step = 0
        self.batch = self.reserved = self.stored = self.num_done = 0
        self.ends: list[tuple[int, int, _Live]] = []
        self.outcome = Outcome(jobs, Meter(), [None] * len(jobs), [None] * len(jobs))

    def run(self, drained: bool) -> Outcome:
        """`drained=False`: metered from a quarter done until none waits, as `paged` is."""
        outcome, jobs = self.outcome, self.jobs
        is_warm = drained
        while self.next < len(jobs) or (drained and self.batch):
            if not self.batch and jobs[self.next].arrival_s > self.clock:
                self.clock = jobs[self.next].arrival_s
            read, decoding = self.stored, self.batch
            new = self._admit()
            self.step += 1
            seconds = self.site.cost.seconds(
                tokens=decoding + sum(jobs[j].prompt * jobs[j].samples for j in new),
                context_tokens=read,
                attended=read + sum(jobs[j].samples * jobs[j].prompt ** 2 / 2 for j in new),
                rows=self.batch,
            )
            self.clock += seconds
            outcome.meter.add(seconds, batch=self.batch, stored=self.stored, reserved=self.reserved)
            self.stored += self.batch
            if not is_warm and 4 * self.num_done >= len(jobs):
                outcome.meter, is_warm = Meter(), True
            for j in new:
                outcome.first_s[j] = self.clock
            self._retire()
        outcome.end_s = self.clock
        return outcome

    def _admit(self) -> list[int]:
        new: list[int] = []
        while self.next < len(self.jobs) and self.jobs[self.next].arrival_s <= self.clock:
            job, held = self.jobs[self.next], []
            for _ in range(job.samples):
                chunk = self.memory.try_take(self.size(job))
                if chunk is None:
                    break
                held.append(chunk)
            if len(held) < job.samples:
                for chunk in held:
                    self.memory.give_back(*chunk)
                assert self.batch or new, f"a job larger than the memory: {job}"
                break
            self.batch += job.samples
            self.reserved += sum(size for _, size in held)
            self.stored += job.prompt * job.samples
            end = self.step + job.output
            heapq.heappush(self.ends, (end, self.next, _Live(self.next, held)))
            new.append(self.next)
            self.next += 1
        return new

    def _retire(self) -> None:
        while self.ends and self.ends[0][0] <= self.step:
            _, _, live = heapq.heappop(self.ends)
            job = self.jobs[live.job]
            for start, size in live.held:
                self.memory.give_back(start, size)
                self.reserved -= size
            self.batch -= job.samples
            self.stored -= (job.prompt + job.output) * job.samples
            self.outcome.finish_s[live.job] = self.clock
            self.num_done += 1


def faster(site: Site, jobs: Seq[Job]) -> Outcome:
    """FasterTransformer behind a dynamic batcher: the maximum is reserved for every sequence."""
    most = site.slots // MAX_TOKENS
    return _batches(site, jobs, lambda batch: sum(j.samples for j in batch) <= most)


def transformers(site: Site, jobs: Seq[Job]) -> Outcome:
    """Static batches as large as the padded rectangle fits; a KV cache that is copied to grow."""

    def fits(batch: Seq[Job]) -> bool:
        longest = max(job.prompt for job in batch) + max(job.output for job in batch)
        return longest * sum(job.samples for job in batch) <= site.slots

    return _batches(_with_copies(site), jobs, fits, padded=True)


def _with_copies(site: Site) -> Site:
    return replace(site, cost=replace(site.cost, kv_passes=3.0))


def _batches(
    site: Site, jobs: Seq[Job], fits: Callable[[Seq[Job]], bool], *, padded: bool = False
) -> Outcome:
    """One batch after another, each held until its longest answer ends."""
    outcome = Outcome(jobs, Meter(), [None] * len(jobs), [None] * len(jobs))
    waiting, clock, place = deque(range(len(jobs))), 0.0, 0
    while waiting:
        clock = max(clock, jobs[waiting[0]].arrival_s)
        batch: list[int] = []
        while waiting and jobs[waiting[0]].arrival_s <= clock:
            if batch and not fits([jobs[j] for j in (*batch, waiting[0])]):
                break
            batch.append(waiting.popleft())
        clock = _run_batch(site, outcome, batch, clock, padded)
        place += len(batch)
    outcome.end_s = clock
    return outcome


def _run_batch(site: Site, outcome: Outcome, batch: list[int], clock: float, padded: bool) -> float:
    """Runs a batch to its longest output; a job is answered when the whole batch is."""
    jobs = [outcome.jobs[j] for j in batch]
    rows = sum(job.samples for job in jobs)
    widest = max(job.prompt for job in jobs)
    prompts = sum((widest if padded else job.prompt) * job.samples for job in jobs)
    squares = sum((widest if padded else job.prompt) ** 2 * job.samples for job in jobs)
    seconds = site.cost.seconds(tokens=prompts, context_tokens=0, attended=squares / 2, rows=rows)
    outcome.meter.add(seconds, batch=rows)
    clock += seconds
    for j in batch:
        outcome.first_s[j] = clock
    for step in range(1, max(job.output for job in jobs)):
        read = prompts + rows * step
        seconds = site.cost.seconds(tokens=rows, context_tokens=read, attended=read, rows=rows)
        outcome.meter.add(seconds, batch=rows)
        clock += seconds
    for j in batch:
        outcome.finish_s[j] = clock
    return clock
