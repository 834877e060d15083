"""A device that stores token ids in its slots, and an engine loop that drives it.

The device's next token is a hash of the tokens it finds in a row's slots, so a wrong slot, a
missing write or a block handed out twice changes the output. It also knows what every sequence
should say and compares whatever a plan holds with it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import (
    Ladder,
    PlannedRow,
    Request,
    Scheduler,
    SequenceUpdate,
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


@dataclass
class News:
    """All that a request has been told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    raw_sum: float = 0.0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    ends: list[SequenceUpdate] = field(default_factory=list)
    num_preemptions: int = 0


class Driver:
    """The engine's loop: dispatches a plan, then reads the one before it (depth 1) or it itself."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        depth: int = 1,
        prefill_ladder: Ladder | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, cache, prefill_ladder=prefill_ladder)
        self.config = config
        self.cache = cache
        self.depth = depth
        self.device = FakeDevice(cache)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.news: dict[str, News] = {}
        self.seq_ids: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        seq_id = len(self.device.requests) + 1
        self.device.requests[seq_id] = request
        self.seq_ids[request.request_id] = seq_id
        self.news[request.request_id] = News()
        self.take_news()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None and not self.in_flight:
            assert not self.scheduler.num_running and not self.scheduler.num_waiting, "stalled"
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.scheduler.update(*self.in_flight.popleft())
        self.take_news()

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            before = (len(self.plans), len(self.in_flight), self.num_ended)
            self.step()
            self.scheduler.check_integrity()
            assert before != (len(self.plans), len(self.in_flight), self.num_ended), "stuck"
        raise AssertionError(f"not done after {max_steps} steps")

    @property
    def num_ended(self) -> int:
        return sum(bool(news.ends) for news in self.news.values())

    def take_news(self) -> None:
        for update in self.scheduler.take_updates():
            news = self.news[update.request_id]
            assert not news.ends, f"news after the end: {update}"
            assert (update.seq_id, update.sample_index) == (self.seq_ids[update.request_id], 0)
            news.token_ids += update.new_token_ids
            news.logprobs += update.logprobs
            news.raw_sum += update.raw_logprob_sum
            news.num_preemptions = update.num_preemptions
            if update.prompt_logprobs is not None:
                assert news.prompt_logprobs is None, "handed out twice"
                news.prompt_logprobs = update.prompt_logprobs
            if update.finish_reason is not None or update.error is not None:
                assert update.finish_reason is None or update.error is None
                news.ends.append(update)

    def check_done(self, request: Request) -> None:
        """That a request nobody interfered with has ended as it must, wherever it ran."""
        news = self.news[request.request_id]
        want = expected(request, self.config, self.cache)
        assert tuple(news.token_ids) == want.token_ids
        (end,) = news.ends
        assert (end.finish_reason, end.stop_reason) == (want.finish_reason, want.stop_reason)
        assert (end.error is not None) == want.is_error
        tokens = [*request.prompt_token_ids, *want.token_ids]
        probs = [
            logprob(tokens[:i], tokens[i])
            for i in range(len(request.prompt_token_ids), len(tokens))
        ]
        assert abs(news.raw_sum - sum(probs)) < 1e-6
        if request.params.logprobs is not None:
            assert [entry.logprob for entry in news.logprobs] == [p / 2 for p in probs]
            assert [entry.token_id for entry in news.logprobs] == list(want.token_ids)
        else:
            assert not news.logprobs
        if request.params.prompt_logprobs is None:
            assert news.prompt_logprobs is None
        else:
            self.check_prompt_logprobs(request)

    def check_prompt_logprobs(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        want = [
            TokenLogprob(prompt[i], logprob(prompt[:i], prompt[i])) for i in range(1, len(prompt))
        ]
        assert self.news[request.request_id].prompt_logprobs == (None, *want)

    def check_idle(self) -> None:
        """Nothing is left behind."""
        scheduler = self.scheduler
        assert not scheduler.has_unfinished and not self.in_flight
        assert scheduler.blocks_free == scheduler.blocks_total
        assert scheduler.num_running == scheduler.num_waiting == 0

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        rows, seen = plan.rows, {row.seq_id for row in plan.rows}
        assert rows and len(seen) == len(rows), "a sequence has two rows"
        if any(row.num_tokens > 1 for row in rows):
            assert len(rows) <= config.max_prefill_rows
            assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(rows) <= config.max_num_seqs
        owners: dict[int, int] = {}
        unread = [row for unread, _ in self.in_flight for row in unread.rows]
        for row in (*unread, *rows):  # an unread plan's blocks belong to nobody else
            for block in row.block_ids:
                assert owners.setdefault(block, row.seq_id) == row.seq_id, f"block {block}"
        busy = {row.seq_id for row in unread}
        again = [row for row in rows if row.start == 0 and row.seq_id in busy]
        assert not again, f"begins anew before its last step was read: {again}"
        ended = {self.seq_ids[name] for name, news in self.news.items() if news.ends}
        assert not seen & ended, "a sequence runs after its end"
