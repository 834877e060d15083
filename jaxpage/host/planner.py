"""Which sequences the next step runs, and with how many tokens; who gives way for them.

Owns the queues and the blocks. Knows no result and no reason for an end, only that a step was
read. A step either prefills or decodes, and prefill goes first.

    running, oldest first     A     B     C     D         9 blocks, none free, all read
    tables                    3     3     2     1         A's, B's and C's blocks are full
    A needs a block           D gives way, A takes its block
    B needs a block           C gives way, B takes one of its two
    C, D                      wait in this order, with the tokens they have; one block is free
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import policy
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.buckets import Ladder, cut_to_rung
from jaxpage.host.counters import Counters
from jaxpage.host.plan import PlannedRow, StepPlan
from jaxpage.host.rows import build_row
from jaxpage.host.sequence import Sequence, Status


class Part(NamedTuple):
    """A sequence's share of the step being planned."""

    sequence: Sequence
    num_tokens: int


class Planner:
    """The waiting, the running and their blocks; makes plans of them."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        prefill_ladder: Ladder | None,
        counters: Counters,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # both in the policy's order
        self.blocks = BlockManager(cache)
        self.last_planned = 0
        self.last_read = 0
        self._config = config
        self._cache = cache
        self._ladder = prefill_ladder
        self._counters = counters
        self._preempted: list[int] = []
        self._outgrown: list[Sequence] = []

    def enqueue(self, sequence: Sequence) -> None:
        """Lines a sequence up at its place in the policy's order."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=policy.rank)

    def plan(self) -> StepPlan | None:
        """The next step, or None while nothing can run before a result is read."""
        parts = self._prefill_parts() or self._decode_parts()
        if not parts and self._outgrown:
            parts = self._prefill_parts()  # the pool has just been emptied
        return self._dispatch(parts) if parts else None

    def take_outgrown(self) -> list[Sequence]:
        """Sequences that `plan` dropped because they need more than the whole pool."""
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def step_read(self, step_id: int) -> None:
        """Makes what this step was the last to touch available again. Steps come in order."""
        assert step_id == self.last_read + 1 <= self.last_planned, (step_id, self.last_read)
        self.last_read = step_id
        self.blocks.step_read(step_id)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended; its blocks come back once no step uses them."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.ENDED

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step that holds the sequence has not been read."""
        return sequence.last_step > self.last_read

    def check_integrity(self) -> None:
        """Queues in order and disjoint, tables exactly for the running, no slot to spare."""
        self.blocks.check_integrity()
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            ranks = [policy.rank(sequence) for sequence in queue]
            assert ranks == sorted(set(ranks)), f"{status} out of order: {ranks}"
            assert all(sequence.status is status for sequence in queue), status
        assert len(self.running) <= self._config.max_num_seqs, len(self.running)
        assert 0 <= self.last_planned - self.last_read <= 2, (self.last_planned, self.last_read)
        allocated = 0
        for sequence in self.running:
            blocks = self._cache.blocks_for(max(sequence.num_computed, sequence.prefill_len))
            assert len(self.blocks.table(sequence.seq_id)) == blocks, sequence
            assert sequence.num_computed <= sequence.num_tokens <= sequence.max_len, sequence
            allocated += blocks
        assert allocated * self._cache.block_size == self.blocks.num_slots_allocated, allocated
        assert all(sequence.num_computed == 0 for sequence in self.waiting)

    def _prefill_parts(self) -> list[Part]:
        """Prompts under way, then of the waiting what rows, tokens and blocks allow, in order."""
        budget, ladder = self._config.max_num_batched_tokens, self._ladder
        if ladder is not None:
            budget = min(budget, ladder.sizes[-1])
        under_way = (sequence for sequence in self.running if sequence.is_prefilling)
        parts: list[Part] = []
        for sequence in chain(under_way, self._admissible()):
            if not budget or len(parts) == self._config.max_prefill_rows:
                break
            parts.append(Part(sequence, min(_num_left(sequence), budget)))
            budget -= parts[-1].num_tokens
        if ladder is not None and parts:
            _trim(parts, ladder)
        for sequence, _ in parts:
            if sequence.status is Status.WAITING:
                self._admit(sequence)
        return parts

    def _admissible(self) -> Iterator[Sequence]:
        """The waiting who could all be admitted together; nobody overtakes one who does not fit."""
        num_free, num_running = self.blocks.num_free, len(self.running)
        for sequence in self.waiting:
            if num_running == self._config.max_num_seqs or self.is_in_flight(sequence):
                return
            num_free -= self._cache.blocks_for(sequence.num_to_prefill)
            if num_free < policy.reserved_blocks(num_running):
                return
            num_running += 1
            yield sequence

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=policy.rank)
        if not sequence.num_preemptions:
            self._counters.prompt_tokens += sequence.prompt_len
        sequence.status = Status.RUNNING
        sequence.prefill_len = sequence.num_to_prefill
        self.blocks.open(sequence.seq_id, sequence.prefill_len)

    def _decode_parts(self) -> list[Part]:
        """One token of every sequence that has room for it, or gets it, in the policy's order."""
        parts: list[Part] = []
        for sequence in tuple(self.running):
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to one before it
            assert not sequence.is_prefilling, f"a step of decodes holds prefill: {sequence}"
            if sequence.num_computed == self.blocks.capacity(sequence.seq_id):
                if not self._find_block(sequence):
                    continue
                self.blocks.grow(sequence.seq_id)
            parts.append(Part(sequence, 1))
        return parts

    def _find_block(self, sequence: Sequence) -> bool:
        """Whether a block is free for the sequence, after others have given way for it.

        False leaves it out of this step: it waits for held blocks or for its own result, or it
        gave way itself, or it has outgrown the pool.
        """
        while not self.blocks.num_free:
            if self.blocks.num_held:
                return False
            victim = policy.choose_victim(self.running)
            if len(self.running) > 1:
                self._preempt(victim)
            elif not self.is_in_flight(sequence):  # a result unread might be the end
                self._stop_running(sequence)
                sequence.status = Status.ENDED
                self._outgrown.append(sequence)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Recompute: the blocks go, the tokens stay, a token in flight is kept when read."""
        self._stop_running(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._counters.preemptions_recompute += 1
        self._preempted.append(sequence.seq_id)
        self.enqueue(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        until_step = sequence.last_step if self.is_in_flight(sequence) else None
        self.blocks.release(sequence.seq_id, until_step=until_step)

    def _dispatch(self, parts: list[Part]) -> StepPlan:
        """The plan of these parts; the books are from here on as if the step had run."""
        step_id = self.last_planned + 1
        rows: list[PlannedRow] = []
        num_draws = 0
        for sequence, num_tokens in parts:
            assert sequence.status is Status.RUNNING, f"planned, then taken back: {sequence}"
            assert not sequence.num_in_flight or sequence.last_step == step_id - 1, sequence
            row = build_row(sequence, num_tokens, self.blocks.table(sequence.seq_id))
            rows.append(row)
            sequence.num_computed = row.context_len
            sequence.last_step = step_id
            sequence.group.num_targets += len(row.prompt_targets)
            if row.draws:
                sequence.num_in_flight += 1
                sequence.draw_index = num_draws
                num_draws += 1
            self.blocks.store(sequence.seq_id, row.context_len)
        self.last_planned = step_id
        self._count_step()
        for sequence, _ in parts:
            if sequence.is_last_step_planned:
                self._stop_running(sequence)
                sequence.status = Status.LEAVING
        preempted, self._preempted = tuple(self._preempted), []
        return StepPlan(step_id=step_id, rows=tuple(rows), preempted=preempted)

    def _count_step(self) -> None:
        counters, blocks = self._counters, self.blocks
        counters.num_steps += 1
        counters.running_sum += len(self.running)
        counters.utilisation_sum += blocks.num_slots_in_use / blocks.num_slots_allocated


def _num_left(sequence: Sequence) -> int:
    """Tokens to prefill, of one that runs or would be admitted now."""
    if sequence.status is Status.WAITING:
        return sequence.num_to_prefill
    return sequence.prefill_len - sequence.num_computed


def _trim(parts: list[Part], ladder: Ladder) -> None:
    """Leaves to the next step, from the end, what would mostly be padding in this one."""
    total = sum(part.num_tokens for part in parts)
    surplus = total - cut_to_rung(total, ladder)
    while surplus:
        sequence, num_tokens = parts.pop()
        kept = max(num_tokens - surplus, 0)
        if kept:
            parts.append(Part(sequence, kept))
        surplus -= num_tokens - kept
