"""A counting twin of the paged scheduler: the same policy with numbers in place of tables.

It exists for a million requests: no token, table or plan is built.
`python -m benchmarks.service.scale` sets it beside the real scheduler on the same trace before
anything it says is used.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from benchmarks.sim.cost import Site
from benchmarks.sim.lengths import Job


@dataclass(slots=True)
class _Sequence:
    arrival_s: float
    prompt: int
    """Tokens to feed when admitted: the prompt, and what it had drawn before it gave way."""
    left: int
    """Tokens still to draw."""
    output: int
    """Tokens to draw in all."""
    serial: int = 0
    start_step: int = 0
    phase: int = 0
    """Decode steps after which it needs a block, modulo the block size."""
    ends: int = 0
    """The step that draws its last token; 0 while it waits."""


@dataclass(slots=True)
class Totals:
    """What a run over a stream of jobs adds up to; seconds are modelled."""

    requests: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    latency_sum_s: float = 0.0
    normalised_sum_s: float = 0.0
    """Of latency by token of output."""
    batch_seconds: float = 0.0

    @property
    def mean_batch(self) -> float:
        return self.batch_seconds / self.seconds if self.seconds else 0.0


class CountingEngine:
    """One replica. Jobs come from an iterator in order of arrival, so memory stays small."""

    def __init__(
        self,
        site: Site,
        *,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2560,
    ) -> None:
        self._site, self._size = site, block_size
        self._most_tokens = max_num_batched_tokens
        self._most_seqs = max_num_seqs or site.max_num_seqs
        self._free = site.slots // block_size
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by admission; ended ones are dropped lazily
        self._num_running = 0
        self._growing = [0] * block_size  # sequences that need a block, by phase
        self._ends: list[tuple[int, int, _Sequence]] = []
        self._stored = 0
        self._step = 0
        self._serial = 0
        self.clock = 0.0
        self.totals = Totals()

    def run(self, jobs: Iterator[Job]) -> Totals:
        """Runs the whole stream to its end."""
        coming = deque(islice(jobs, 1))
        while coming or self._waiting or self._num_running:
            while coming and coming[0].arrival_s <= self.clock:
                job = coming.popleft()
                self._waiting.append(_Sequence(job.arrival_s, job.prompt, job.output, job.output))
                coming.extend(islice(jobs, 1))
            if not self._num_running and not self._waiting:
                self.clock = max(self.clock, coming[0].arrival_s)
                continue
            self._one_step()
        self.totals.seconds = self.clock
        return self.totals

    def _one_step(self) -> None:
        """Decodes everybody and, beside them, prefills what fits, as the scheduler mixes."""
        self._step += 1
        self._grow()
        rows, read = self._num_running, self._stored
        new_tokens, squares = self._admit(rows)
        seconds = self._site.cost.seconds(
            tokens=rows + new_tokens,
            context_tokens=read,
            attended=read + squares / 2,
            rows=self._num_running,
        )
        self.clock += seconds
        self.totals.steps += 1
        self.totals.batch_seconds += self._num_running * seconds
        self._stored += rows + new_tokens
        while self._ends and self._ends[0][0] <= self._step:
            sequence = heapq.heappop(self._ends)[2]
            if sequence.ends == self._step:
                self._end(sequence)

    def _grow(self) -> None:
        """Takes a block for each whose table is full; the last admitted give way for it."""
        phase = self._step % self._size
        while self._growing[phase] > self._free:
            self._preempt()
        self._free -= self._growing[phase]

    def _admit(self, rows: int) -> tuple[int, int]:
        tokens = squares = 0
        while self._waiting and self._num_running < self._most_seqs:
            sequence = self._waiting[0]
            blocks = -(-sequence.prompt // self._size)
            reserve = self._num_running + 1 if self._num_running else 0
            is_full = rows + tokens + sequence.prompt > self._most_tokens
            if self._free - blocks < reserve or (tokens and is_full):
                break
            self._waiting.popleft()
            self._free -= blocks
            tokens += sequence.prompt
            squares += sequence.prompt**2
            self._start(sequence)
        return tokens, squares

    def _start(self, sequence: _Sequence) -> None:
        self._serial += 1
        sequence.serial = self._serial
        sequence.start_step = self._step
        # the decode at start + j feeds token prompt + j - 1; it needs a block at a multiple
        sequence.phase = (self._step + 1 - sequence.prompt) % self._size
        sequence.ends = self._step + sequence.left - 1
        self._growing[sequence.phase] += 1
        self._num_running += 1
        self._running.append(sequence)
        heapq.heappush(self._ends, (sequence.ends, self._serial, sequence))

    def _stop(self, sequence: _Sequence, stored: int) -> None:
        self._growing[sequence.phase] -= 1
        self._num_running -= 1
        self._stored -= stored
        self._free += -(-stored // self._size)
        sequence.ends = 0
        while self._running and not self._running[-1].ends:
            self._running.pop()
        if len(self._running) > 2 * self._num_running + 64:
            self._running = [each for each in self._running if each.ends]

    def _end(self, sequence: _Sequence) -> None:
        totals = self.totals
        totals.requests += 1
        latency = self.clock - sequence.arrival_s
        totals.latency_sum_s += latency
        totals.normalised_sum_s += latency / sequence.output
        totals.output_tokens += sequence.left
        self._stop(sequence, sequence.prompt + sequence.left - 1)

    def _preempt(self) -> None:
        """The last admitted gives way; it comes back first, with the tokens it has."""
        sequence = self._running[-1]
        drawn = self._step - sequence.start_step
        self._stop(sequence, sequence.prompt + drawn - 1)
        self.totals.preemptions += 1
        self.totals.output_tokens += drawn
        sequence.prompt += drawn
        sequence.left -= drawn
        self._waiting.appendleft(sequence)
