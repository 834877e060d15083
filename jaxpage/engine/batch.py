"""The only translator: a host plan becomes device arrays, device arrays become a host result.

It decides nothing: which rows run is the plan's business, what they compute the device's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.device.types import StepInput, StepOutput, StepShape, unpack
from jaxpage.host.buckets import Ladder
from jaxpage.host.plan import PlannedRow, StepPlan, StepResult
from jaxpage.outputs import TokenLogprob

SMALLEST_PREFILL_TOKENS = 16
"""The first rung of prefill: below it a step's time is that of reading the weights."""


@dataclass(frozen=True, slots=True)
class Ladders:
    """The rungs that steps are padded to: together they bound the number of programs."""

    decode_rows: Ladder
    prefill_tokens: Ladder
    prefill_rows: int
    table_width: int

    @classmethod
    def of(cls, config: EngineConfig, cache: CacheConfig) -> Ladders:
        tokens = config.max_num_batched_tokens
        return cls(
            decode_rows=Ladder.doubling(1, config.max_num_seqs),
            prefill_tokens=Ladder.doubling(min(SMALLEST_PREFILL_TOKENS, tokens), tokens),
            prefill_rows=config.max_prefill_rows,
            table_width=cache.blocks_for(config.max_model_len),
        )

    def decode(self, num_rows: int) -> StepShape:
        rows = self.decode_rows.fit(num_rows)
        return StepShape(rows, rows, self.table_width, rows)

    def prefill(self, num_tokens: int) -> StepShape:
        tokens = self.prefill_tokens.fit(num_tokens)
        return StepShape(tokens, self.prefill_rows, self.table_width, self.prefill_rows)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The program's shape for a plan; raises AssertionError when no rung holds it."""
        if plan.is_decode and not any(row.prompt_targets for row in plan.rows):
            return self.decode(len(plan.rows))
        assert len(plan.rows) <= self.prefill_rows, (len(plan.rows), self.prefill_rows)
        return self.prefill(plan.num_tokens)

    def all_shapes(self) -> tuple[StepShape, ...]:
        """Every forward program that can ever be asked for."""
        return (
            *(self.decode(rows) for rows in self.decode_rows.sizes),
            *(self.prefill(tokens) for tokens in self.prefill_tokens.sizes),
        )


class StepInputBuilder:
    """Writes plans as packed int32 vectors; keeps each sequence's table until it changes."""

    def __init__(self, ladders: Ladders, cache: CacheConfig) -> None:
        self._ladders = ladders
        self._block_size = cache.block_size
        self._first_dead_slot = (cache.num_blocks + 1) * cache.block_size
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def build(self, plan: StepPlan) -> tuple[np.ndarray, StepShape]:
        """The plan as one int32 vector, a fresh one: a running step may still read the last."""
        shape = self._ladders.shape_of(plan)
        vector = np.zeros(shape.packed_size, np.int32)
        step = unpack(vector, shape)  # views into the vector
        if shape.is_decode:
            self._fill_decode(step, plan.rows)
        else:
            self._fill_prefill(step, plan.rows)
        live = int(step.query_starts[-1])
        step.slots[live:] = self._first_dead_slot + np.arange(shape.num_tokens - live)
        self._forget({row.seq_id for row in plan.rows})
        return vector, shape

    def _fill_decode(self, step: StepInput, rows: tuple[PlannedRow, ...]) -> None:
        count = len(rows)
        step.tokens[:count] = [row.token_ids[0] if row.token_ids else 0 for row in rows]
        step.positions[:count] = [row.start for row in rows]
        for index, row in enumerate(rows):
            step.block_tables[index] = self._table(row)
        block, offset = np.divmod(step.positions[:count], self._block_size)
        step.slots[:count] = step.block_tables[np.arange(count), block] * self._block_size + offset
        step.query_starts[:] = np.minimum(np.arange(step.query_starts.size), count)
        self._fill_rows(step, rows)
        draws = [index for index, row in enumerate(rows) for _ in row.draws]
        step.logit_index[: len(draws)] = draws

    def _fill_prefill(self, step: StepInput, rows: tuple[PlannedRow, ...]) -> None:
        end, draws = 0, []
        for index, row in enumerate(rows):
            begin, end = end, end + row.num_tokens
            positions = np.arange(row.start, row.context_len, dtype=np.int32)
            table = self._table(row)
            if row.token_ids:
                step.tokens[begin:end] = row.token_ids
            step.positions[begin:end] = positions
            step.slots[begin:end] = (
                table[positions // self._block_size] * self._block_size
                + positions % self._block_size
            )
            step.block_tables[index] = table
            step.query_starts[index + 1] = end
            draws += [end - 1] * len(row.draws)
        step.query_starts[len(rows) + 1 :] = end
        self._fill_rows(step, rows)
        step.logit_index[: len(draws)] = draws

    @staticmethod
    def _fill_rows(step: StepInput, rows: tuple[PlannedRow, ...]) -> None:
        count = len(rows)
        step.context_lens[:count] = [row.context_len for row in rows]
        step.prompt_lens[:count] = [row.prompt_len for row in rows]
        step.token_source[:count] = [0 if row.source is None else row.source + 1 for row in rows]

    def _table(self, row: PlannedRow) -> np.ndarray:
        """The row's block table padded with the null block; the tuple's identity is its version."""
        known = self._tables.get(row.seq_id)
        if known is not None and known[0] is row.block_ids:
            return known[1]
        table = np.zeros(self._ladders.table_width, np.int32)
        table[: len(row.block_ids)] = row.block_ids
        self._tables[row.seq_id] = (row.block_ids, table)
        return table

    def _forget(self, live: set[int]) -> None:
        """Drops the tables of sequences that have gone, now and then."""
        if len(self._tables) > 4 * max(16, len(live)):
            self._tables = {key: self._tables[key] for key in live}


def prompt_targets(plan: StepPlan, shape: StepShape) -> np.ndarray | None:
    """[T] int32: the id whose log-probability each token's logits are asked for, 0 elsewhere."""
    if not any(row.prompt_targets for row in plan.rows):
        return None
    targets = np.zeros(shape.num_tokens, np.int32)
    for row, span in _target_spans(plan):
        targets[span] = row.prompt_targets
    return targets


def to_result(
    plan: StepPlan,
    output: StepOutput | None,
    scored: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
) -> StepResult:
    """The host twin of a fetched StepOutput (NumPy arrays), real draws only.

    None: nothing was drawn, as in a step that holds only beginnings of prompts.
    """
    draws = plan.draws
    prompt_logprobs = () if scored is None else _scored_prompts(plan, scored)
    if output is None:
        assert not draws, f"{len(draws)} draws without an output"
        return StepResult(plan.step_id, [], [], [], (), prompt_logprobs)
    count = len(draws)
    wanted = [draw.params.logprobs or 0 for draw in draws]
    top: tuple[tuple[tuple[int, float], ...], ...] = ((),) * count
    if any(wanted):
        ids, logprobs = output.top_ids[:count].tolist(), output.top_logprobs[:count].tolist()
        top = tuple(_pairs(i, p, k) for i, p, k in zip(ids, logprobs, wanted, strict=True))
    return StepResult(
        step_id=plan.step_id,
        token_ids=output.token_ids[:count].tolist(),
        logprobs=output.logprobs[:count].tolist(),
        raw_logprobs=output.raw_logprobs[:count].tolist(),
        top=top,
        prompt_logprobs=prompt_logprobs,
    )


def _pairs(ids: list[int], logprobs: list[float], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:count], logprobs[:count], strict=True))


def _target_spans(plan: StepPlan) -> Iterable[tuple[PlannedRow, slice]]:
    end = 0
    for row in plan.rows:
        begin, end = end, end + row.num_tokens
        if row.prompt_targets:
            first = begin + row.target_offset
            yield row, slice(first, first + len(row.prompt_targets))


def _scored_prompts(
    plan: StepPlan, scored: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    logprobs, top_ids, top_logprobs = (array.tolist() for array in scored)
    entries: dict[int, tuple[TokenLogprob, ...]] = {}
    for row, span in _target_spans(plan):
        count = row.num_prompt_logprobs
        entries[row.seq_id] = tuple(
            TokenLogprob(token, logprobs[t], _pairs(top_ids[t], top_logprobs[t], count))
            for token, t in zip(row.prompt_targets, range(span.start, span.stop), strict=True)
        )
    return tuple(entries.get(row.seq_id, ()) for row in plan.rows)
