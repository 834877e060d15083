"""A model that is a hash, and a device that stores token ids in its slots.

The device's next token is a hash of the tokens it finds in a row's slots, so a wrong slot, a
missing write or a block handed out twice changes the output. It also knows what every sequence
should say and compares whatever a plan holds with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import (
    PlannedRow,
    Request,
    StepPlan,
    StepResult,
)
from jaxpage.outputs import TokenLogprob
from jaxpage.sampling_params import SamplingParams

VOCAB = 24


def next_token(tokens: Seq[int], seed: int) -> int:
    """The fake model: any change of any token before changes the next one."""
    return zlib.crc32(repr((seed, list(tokens))).encode()) % VOCAB


def logprob(tokens: Seq[int], token_id: int) -> float:
    return -(zlib.crc32(repr((list(tokens), token_id)).encode()) % 1000) / 100


def request(
    name: str, prompt: Seq[int], *, seed: int = 0, eos: Seq[int] = (), **params: object
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 8, **params}),  # pyright: ignore[reportArgumentType]  # any field
        seed=seed,
        eos_token_ids=frozenset(eos),
        bad_word_ids=((1, 2),),
    )


@dataclass(frozen=True)
class Expected:
    """What a request must say, worked out without a scheduler."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | None
    is_error: bool


def expected(request: Request, config: EngineConfig, cache: CacheConfig) -> Expected:
    params, tokens = request.params, list(request.prompt_token_ids)
    num_prompt = len(tokens)
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_prompt + params.max_tokens)
    while len(tokens) < limit:
        if len(tokens) > cache.num_slots:
            return Expected(tuple(tokens[num_prompt:]), None, None, True)
        token = next_token(tokens, request.seed)
        tokens.append(token)
        if len(tokens) - num_prompt > params.min_tokens:
            output = tuple(tokens[num_prompt:])
            if token in request.eos_token_ids and not params.ignore_eos:
                return Expected(output, "stop", None, False)
            if token in params.stop_token_ids:
                return Expected(output, "stop", token, False)
    return Expected(tuple(tokens[num_prompt:]), "length", None, False)


@dataclass
class FakeDevice:
    """Runs plans in dispatch order. Slots hold token ids; None was never written."""

    cache: CacheConfig
    requests: dict[int, Request] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    last_draws: list[int] = field(default_factory=list)
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)
    targets: dict[int, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        tokens_of = [self._tokens(row) for row in plan.rows]
        written: list[int] = []
        for row, tokens in zip(plan.rows, tokens_of, strict=True):
            self._check_row(row, tokens)
            for position, token in zip(range(row.start, row.context_len), tokens, strict=True):
                slot = self._slot(row, position)
                written.append(slot)
                self.slots[slot] = token
        assert len(set(written)) == len(written), "a slot is written by two rows"
        draws: list[int] = []
        probs: list[float] = []
        scores: list[list[TokenLogprob]] = []
        for row in plan.rows:
            context = [self.slots[self._slot(row, p)] for p in range(row.context_len)]
            assert context == self.truth(row.seq_id, row.context_len), (row, context)
            for draw in row.draws:
                request = self.requests[row.seq_id]
                assert (draw.seq_id, draw.sample_index) == (row.seq_id, 0)
                assert (draw.params, draw.bad_word_ids) == (request.params, request.bad_word_ids)
                draws.append(next_token(context, draw.seed))
                probs.append(logprob(context, draws[-1]))
                self._check_history(row, draw.history)
            scores.append(self._scores(row, context))
        self.last_draws = draws
        return StepResult(
            step_id=plan.step_id,
            token_ids=draws,
            logprobs=[p / 2 for p in probs],
            raw_logprobs=probs,
            top=[((token, p),) for token, p in zip(draws, probs, strict=True)],
            prompt_logprobs=scores if any(scores) else (),
        )

    def truth(self, seq_id: int, num_tokens: int) -> list[int]:
        """The first tokens of a sequence that nothing ends."""
        request = self.requests[seq_id]
        tokens = list(request.prompt_token_ids)
        while len(tokens) < num_tokens:
            tokens.append(next_token(tokens, request.seed))
        return tokens[:num_tokens]

    def _tokens(self, row: PlannedRow) -> list[int]:
        if row.source is None:
            assert len(row.token_ids) == row.num_tokens
            return list(row.token_ids)
        assert row.token_ids == () and row.num_tokens == 1
        return [self.last_draws[row.source]]

    def _slot(self, row: PlannedRow, position: int) -> int:
        size = self.cache.block_size
        block = row.block_ids[position // size]
        assert 1 <= block <= self.cache.num_blocks, row
        return block * size + position % size

    def _check_row(self, row: PlannedRow, tokens: list[int]) -> None:
        assert (
            row.num_tokens >= 1 and tokens == self.truth(row.seq_id, row.context_len)[row.start :]
        )
        assert len(row.block_ids) >= self.cache.blocks_for(row.context_len)
        assert len(set(row.block_ids)) == len(row.block_ids), row
        before = self.tables.get(row.seq_id)
        if row.start:  # at 0 it is new, or back from preemption
            assert before is not None and row.block_ids[: len(before)] == before, row
            assert before != row.block_ids or before is row.block_ids, "equal, but another tuple"
        self.tables[row.seq_id] = row.block_ids
        assert row.prompt_len == len(self.requests[row.seq_id].prompt_token_ids)

    def _check_history(self, row: PlannedRow, history: tuple[int, ...]) -> None:
        if self.requests[row.seq_id].params.needs_history:
            assert list(history) == self.truth(row.seq_id, row.context_len - 1)
        else:
            assert history == ()

    def _scores(self, row: PlannedRow, context: list[int]) -> list[TokenLogprob]:
        request = self.requests[row.seq_id]
        prompt = request.prompt_token_ids
        first = row.start + row.target_offset + 1
        assert row.num_prompt_logprobs == (request.params.prompt_logprobs or 0)
        assert row.target_offset + len(row.prompt_targets) <= row.num_tokens
        assert row.prompt_targets == prompt[first : first + len(row.prompt_targets)]
        asked = self.targets.setdefault(row.seq_id, [])
        asked += range(first, first + len(row.prompt_targets))
        assert len(set(asked)) == len(asked), f"asked twice: {asked}"
        return [
            TokenLogprob(token, logprob(context[: first + j], token))
            for j, token in enumerate(row.prompt_targets)
        ]
