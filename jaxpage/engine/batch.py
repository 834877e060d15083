"""The only translator: a host plan becomes device arrays, device arrays become a host result.

It decides nothing: which rows run is the plan's business, what they compute the device's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxpage.config import CacheConfig
from jaxpage.device.types import StepInput, StepShape, unpack
from jaxpage.engine.prefix_groups import PrefixGroup, PrefixGroups
from jaxpage.engine.step_shapes import StepShapes, tokens_read
from jaxpage.host.plan import PlannedRow, StepPlan, StepResult
from jaxpage.outputs import TokenLogprob


class Template(NamedTuple):
    """The vector that every step of one shape is written into, and copied from."""

    vector: np.ndarray
    step: StepInput
    """Views into the vector."""
    blank: np.ndarray
    """The vector before anything is written."""


class StepInputBuilder:
    """Writes plans as packed int32 vectors; keeps each sequence's table until it changes."""

    def __init__(self, shapes: StepShapes, cache: CacheConfig) -> None:
        self._shapes = shapes
        self._block_size = cache.block_size
        self._first_dead_slot = (cache.num_blocks + 1) * cache.block_size
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self._templates: dict[StepShape, Template] = {}
        self._prefix_groups = PrefixGroups(cache.block_size)

    def build(self, plan: StepPlan) -> tuple[np.ndarray, StepShape]:
        """The plan as one int32 vector, a fresh one: a running step may still read the last."""
        groups: tuple[PrefixGroup, ...] = ()
        if self._shapes.has_groups and plan.num_single == len(plan.rows):
            groups = self._prefix_groups.find(plan)
        shape = self._shapes.shape_of(plan, with_groups=bool(groups))
        vector, step, blank = self._templates.get(shape) or self._add_template(shape)
        vector[:] = blank
        if shape.is_decode:
            count = len(plan.rows)
            self._fill_decode(step, plan.rows)
            step.logit_index[:count] = step.query_starts[:count]
            step.query_starts[count:] = count
            if shape.num_groups:
                self._fill_groups(step, groups)
        else:
            count = plan.num_single if shape.num_single else 0
            self._fill_decode(step, plan.rows[:count])
            self._fill_prefill(step, plan.rows[count:], first=shape.num_single)
            read = _tokens_read(plan, shape, step.query_starts)
            step.logit_index[: len(read)] = read
        if len(self._tables) > 4 * max(16, len(plan.rows)):  # most of these sequences have ended
            self._tables = {row.seq_id: self._tables[row.seq_id] for row in plan.rows}
        return vector.copy(), shape

    def _add_template(self, shape: StepShape) -> Template:
        vector = np.zeros(shape.packed_size, np.int32)
        step = unpack(vector, shape)
        step.slots[:] = self._first_dead_slot + np.arange(shape.num_tokens)
        step.query_starts[:] = np.arange(shape.num_rows + 1)  # as long as rows have one token
        template = self._templates[shape] = Template(vector, step, vector.copy())
        return template

    def _fill_decode(self, step: StepInput, rows: tuple[PlannedRow, ...]) -> None:
        """Row and token i of the step are those of `rows[i]`."""
        count, size = len(rows), self._block_size
        step.tokens[:count] = [row.token_ids[0] if row.token_ids else 0 for row in rows]
        step.positions[:count] = [row.start for row in rows]
        step.slots[:count] = [
            row.block_ids[row.start // size] * size + row.start % size for row in rows
        ]
        for index, row in enumerate(rows):
            step.block_tables[index] = self._table(row)
        self._fill_rows(step, rows, 0)

    def _fill_groups(self, step: StepInput, groups: tuple[PrefixGroup, ...]) -> None:
        step.group_rows[:] = step.block_tables.shape[0]
        for index, group in enumerate(groups):
            step.group_rows[index, : len(group.rows)] = group.rows
            step.prefix_lens[index] = group.num_blocks * self._block_size

    def _fill_prefill(self, step: StepInput, rows: tuple[PlannedRow, ...], *, first: int) -> None:
        """Rows from place `first` on, their tokens after as many decode tokens."""
        end = first
        for index, row in enumerate(rows, start=first):
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
        step.query_starts[first + len(rows) + 1 :] = end
        self._fill_rows(step, rows, first)

    @staticmethod
    def _fill_rows(step: StepInput, rows: tuple[PlannedRow, ...], first: int) -> None:
        own = slice(first, first + len(rows))
        step.context_lens[own] = [row.start + row.num_tokens for row in rows]
        step.prompt_lens[own] = [row.prompt_len for row in rows]
        step.token_source[own] = [0 if row.source is None else row.source + 1 for row in rows]
        if step.adapters is not None:
            step.adapters[own] = [row.adapter for row in rows]

    def _table(self, row: PlannedRow) -> np.ndarray:
        """The row's block table padded with the null block; the tuple's identity is its version."""
        known = self._tables.get(row.seq_id)
        if known is not None and known[0] is row.block_ids:
            return known[1]
        table = np.zeros(self._shapes.table_width, np.int32)
        table[: len(row.block_ids)] = row.block_ids
        self._tables[row.seq_id] = (row.block_ids, table)
        return table


def draw_entries(plan: StepPlan, shape: StepShape, num_draws: int) -> np.ndarray | None:
    """[num_draws] int32: the entry of `logit_index` that each draw reads.

    None where draw i reads entry i and nothing needs to be spread. Each row has, in order, one
    entry for each of its tokens that is read:

        row 0  draws at -1, -1      row 1  none      row 2  draws at 0, 1
        logit_index                 row 0 last, row 1 last, row 2 first, row 2 second
        entries                     0 0 2 3
    """
    counts = [len(row.draws) for row in plan.rows]
    drawing = sum(counts)
    if num_draws == shape.num_draws and counts[:drawing] == [1] * drawing:
        return None
    index = np.zeros(num_draws, np.int32)
    entries, first = [], 0
    for row in plan.rows:
        read = tokens_read(row)
        entries += [first + read.index(draw.offset % row.num_tokens) for draw in row.draws]
        first += len(read)
    index[:drawing] = entries
    return index


def _tokens_read(plan: StepPlan, shape: StepShape, query_starts: np.ndarray) -> list[int]:
    """The places in T of the tokens that draws read, as `draw_entries` counts them."""
    found: list[int] = []
    for place, row in zip(_places(plan, shape).tolist(), plan.rows, strict=True):
        begin = int(query_starts[place])
        found += [begin + offset for offset in tokens_read(row)]
    return found


def prompt_targets(plan: StepPlan, shape: StepShape) -> np.ndarray | None:
    """[T] int32: the id whose log-probability is wanted from each token's logits, 0: none."""
    if not any(row.prompt_targets for row in plan.rows):
        return None
    targets = np.zeros(shape.num_tokens, np.int32)
    for row, span in _target_spans(plan, shape):
        targets[span] = row.prompt_targets
    return targets


def to_result(
    plan: StepPlan,
    shape: StepShape,
    drawn: np.ndarray | None,
    top: tuple[np.ndarray, np.ndarray] | None,
    prompt_logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
) -> StepResult:
    """The host's form of a fetched step, real draws only.

    `drawn` [3, R0] is as `pack_draws` makes it; None: no row drew, as in a step that holds only
    beginnings of prompts. `top`: ids and the bits of log-probabilities, both [R, J].
    `prompt_logprobs`: log-probabilities [T], and the best ids and theirs, both [T, J].
    """
    draws = plan.draws
    of_rows = () if prompt_logprobs is None else _prompt_logprobs(plan, shape, prompt_logprobs)
    if drawn is None:
        assert not draws, f"{len(draws)} draws without an output"
        return StepResult(plan.step_id, [], [], [], (), of_rows)
    count = len(draws)
    pairs: tuple[tuple[tuple[int, float], ...], ...] = ((),) * count
    if top is not None:
        wanted = [draw.num_candidates or draw.params.logprobs or 0 for draw in draws]
        ids, logprobs = top[0][:count].tolist(), top[1][:count].view(np.float32).tolist()
        pairs = tuple(_pairs(i, p, k) for i, p, k in zip(ids, logprobs, wanted, strict=True))
    logprobs, raw_logprobs = drawn[1:, :count].view(np.float32).tolist()
    return StepResult(
        step_id=plan.step_id,
        token_ids=drawn[0, :count].tolist(),
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        top=pairs,
        prompt_logprobs=of_rows,
    )


def _pairs(ids: list[int], logprobs: list[float], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:count], logprobs[:count], strict=True))


def _places(plan: StepPlan, shape: StepShape) -> np.ndarray:
    """The row of the step that each row of the plan is."""
    places = np.arange(len(plan.rows))
    if shape.num_single:
        count = plan.num_single
        places[count:] += shape.num_single - count
    return places


def _target_spans(plan: StepPlan, shape: StepShape) -> Iterable[tuple[PlannedRow, slice]]:
    end = 0
    for place, row in zip(_places(plan, shape), plan.rows, strict=True):
        end = max(end, place) if place < shape.num_single else max(end, shape.num_single)
        begin, end = end, end + row.num_tokens
        if row.prompt_targets:
            first = begin + row.target_offset
            yield row, slice(first, first + len(row.prompt_targets))


def _prompt_logprobs(
    plan: StepPlan, shape: StepShape, fetched: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    logprobs, top_ids, top_logprobs = (array.tolist() for array in fetched)
    entries: dict[int, tuple[TokenLogprob, ...]] = {}
    for row, span in _target_spans(plan, shape):
        count = row.num_prompt_logprobs
        entries[row.seq_id] = tuple(
            TokenLogprob(token, logprobs[t], _pairs(top_ids[t], top_logprobs[t], count))
            for token, t in zip(row.prompt_targets, range(span.start, span.stop), strict=True)
        )
    return tuple(entries.get(row.seq_id, ()) for row in plan.rows)
