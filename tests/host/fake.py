"""A model that is a hash, and a device that stores token ids in its slots.

The device's next token is a hash of the tokens it finds in a row's slots, so a wrong slot, a
missing write or copy, a block handed out twice or read too late changes the output. It also knows
what every sampled sequence should say and compares whatever a plan holds with it.
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
from jaxpage.host.beam import BeamSearch, Hypothesis, num_candidates
from jaxpage.host.limits import length_limit
from jaxpage.host.plan import BlockMoves, Draw, Namespace
from jaxpage.outputs import TokenLogprob
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

VOCAB = 24


def next_token(tokens: Seq[int], seed: int, sample_index: int = 0) -> int:
    """The fake model: any change of any token before changes the next one."""
    stream = (seed, sample_index) if sample_index else seed
    return zlib.crc32(repr((stream, list(tokens))).encode()) % VOCAB


def logprob(tokens: Seq[int], token_id: int) -> float:
    return -(zlib.crc32(repr((list(tokens), token_id)).encode()) % 1000) / 100


def candidates(tokens: Seq[int], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest next tokens, best first."""
    ranked = sorted((-logprob(tokens, token_id), token_id) for token_id in range(VOCAB))
    return tuple((token_id, -cost) for cost, token_id in ranked[:count])


def salted(salt: str | None) -> Namespace:
    """What keeps the prompts of this salt apart."""
    return () if salt is None else (("salt", salt),)


def request(
    name: str,
    prompt: Seq[int],
    *,
    seed: int = 0,
    eos: Seq[int] = (),
    priority: int = 0,
    salt: str | None = None,
    **params: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 8, **params}),  # pyright: ignore[reportArgumentType]  # any field
        seed=seed,
        eos_token_ids=frozenset(eos),
        bad_word_ids=((1, 2),),
        priority=priority,
        namespace=salted(salt),
    )


def beam_request(
    name: str,
    prompt: Seq[int],
    width: int,
    *,
    max_tokens: int = 8,
    eos: Seq[int] = (),
    priority: int = 0,
    **settings: object,
) -> Request:
    beam = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **settings)  # pyright: ignore[reportArgumentType]  # any field
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=beam.stop_token_ids,
            ignore_eos=beam.ignore_eos,
        ),
        seed=0,
        eos_token_ids=frozenset(eos),
        priority=priority,
        beam=beam,
    )


def expected_beams(request: Request, config: EngineConfig) -> tuple[Hypothesis, ...]:
    """A beam search worked out without blocks, steps or a scheduler."""
    assert request.beam is not None
    eos = frozenset() if request.params.ignore_eos else request.eos_token_ids
    end_ids = eos.union(request.params.stop_token_ids)
    prompt = request.prompt_token_ids
    max_output = length_limit(request, config) - len(prompt)
    search = BeamSearch(request.beam, end_ids=end_ids, max_output=max_output)
    count, outputs = num_candidates(request.beam, end_ids), [()]
    while not search.is_done:
        best = [candidates((*prompt, *output), count) for output in outputs]
        outputs = [
            (*outputs[entry.parent], entry.token_id) for entry in search.advance(best, outputs)
        ]
    return search.finished


@dataclass(frozen=True)
class Expected:
    """What a request must say, worked out without a scheduler."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | None
    is_error: bool


def expected(
    request: Request, config: EngineConfig, cache: CacheConfig, sample_index: int = 0
) -> Expected:
    params, tokens = request.params, list(request.prompt_token_ids)
    num_prompt = len(tokens)
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_prompt + params.max_tokens)
    while len(tokens) < limit:
        if len(tokens) > cache.num_blocks * cache.block_size:
            return Expected(tuple(tokens[num_prompt:]), None, None, True)
        token = next_token(tokens, request.seed, sample_index)
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
    """Runs plans in dispatch order. Slots hold token ids; what is not there was never written."""

    cache: CacheConfig
    requests: dict[int, Request] = field(default_factory=dict)
    """By sequence id; `add` fills it in."""
    samples: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    host: dict[int, dict[int, int]] = field(default_factory=dict)
    last_draws: list[int] = field(default_factory=list)
    targets: dict[int, list[int]] = field(default_factory=dict)
    _truths: dict[int, list[int]] = field(default_factory=dict)

    def add(self, request: Request) -> int:
        """The id of the request's first sequence, as the scheduler numbers them."""
        first = len(self.requests) + 1
        for index in range(request.num_sequences):
            self.requests[first + index] = request
            self.samples[first + index] = index
        return first

    def run(self, plan: StepPlan) -> StepResult:
        self._move(plan.moves)
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
        top: list[tuple[tuple[int, float], ...]] = []
        scores: list[list[TokenLogprob]] = []
        for row in plan.rows:
            context = [self.slots[self._slot(row, p)] for p in range(row.context_len)]
            if self.requests[row.seq_id].beam is None:
                assert context == self.truth(row.seq_id, row.context_len), (row, context)
            for draw in row.draws:
                self._check_draw(row, draw)
                draws.append(next_token(context, draw.seed, draw.sample_index))
                probs.append(logprob(context, draws[-1]))
                top.append(((draws[-1], probs[-1]),))
                if draw.num_candidates:
                    top[-1] = candidates(context, draw.num_candidates)
            scores.append(self._scores(row, context))
        self.last_draws = draws
        return StepResult(
            step_id=plan.step_id,
            token_ids=draws,
            logprobs=[p / 2 for p in probs],
            raw_logprobs=probs,
            top=top,
            prompt_logprobs=scores if any(scores) else (),
        )

    def truth(self, seq_id: int, num_tokens: int) -> list[int]:
        """The first tokens of a sequence that nothing ends."""
        request = self.requests[seq_id]
        tokens = self._truths.setdefault(seq_id, list(request.prompt_token_ids))
        while len(tokens) < num_tokens:
            tokens.append(next_token(tokens, request.seed, self.samples.get(seq_id, 0)))
        return tokens[:num_tokens]

    def _move(self, moves: BlockMoves) -> None:
        """Each group reads all before it writes any; no place is written twice."""
        for places in (moves.swap_out, moves.swap_in, moves.copies):
            written = [destination for _, destination in places]
            assert len(set(written)) == len(written), f"a block is written twice: {moves}"
        assert all(0 <= host < self.cache.num_swap_blocks for _, host in moves.swap_out), moves
        self.host.update({host: self._block(block) for block, host in moves.swap_out})
        coming = [(block, dict(self.host[host])) for host, block in moves.swap_in]
        for block, content in coming:
            self._put(block, content)
        copied = [(block, self._block(source)) for source, block in moves.copies]
        for block, content in copied:
            self._put(block, content)

    def _block(self, block: int) -> dict[int, int]:
        size = self.cache.block_size
        slots = self.slots
        return {o: slots[block * size + o] for o in range(size) if block * size + o in slots}

    def _put(self, block: int, content: dict[int, int]) -> None:
        assert 1 <= block <= self.cache.num_blocks, block
        size = self.cache.block_size
        for offset in range(size):
            self.slots.pop(block * size + offset, None)
        self.slots.update({block * size + offset: token for offset, token in content.items()})

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
        request = self.requests[row.seq_id]
        assert row.num_tokens >= 1
        if request.beam is None:
            assert tokens == self.truth(row.seq_id, row.context_len)[row.start :]
        assert len(row.block_ids) >= self.cache.blocks_for(row.context_len)
        assert len(set(row.block_ids)) == len(row.block_ids), row
        assert row.prompt_len == len(request.prompt_token_ids)

    def _check_draw(self, row: PlannedRow, draw: Draw) -> None:
        request = self.requests[row.seq_id]
        assert self.requests[draw.seq_id] is request
        assert draw.sample_index == self.samples.get(draw.seq_id, 0)
        assert draw.seq_id == row.seq_id or row.context_len == row.prompt_len
        assert (draw.params, draw.bad_word_ids) == (request.params, request.bad_word_ids)
        assert bool(draw.num_candidates) == (request.beam is not None)
        if request.params.needs_history:
            assert list(draw.history) == self.truth(row.seq_id, row.context_len - 1)
        else:
            assert draw.history == ()

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
