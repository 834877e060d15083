"""An engine loop around a scheduler and the fake device, that keeps and checks all news."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import Ladder, Request, Scheduler, SequenceUpdate, StepPlan, StepResult
from jaxpage.outputs import TokenLogprob
from tests.host.fake import VOCAB, FakeDevice, expected, logprob

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


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


def engine(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    depth: int = 1,
    prefill_ladder: Ladder | None = None,
    max_model_len: int = 256,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_prefill_rows: int = 8,
) -> Driver:
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_rows=max_prefill_rows,
    )
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return Driver(config, cache, depth=depth, prefill_ladder=prefill_ladder)


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % VOCAB for i in range(num_tokens)]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, row.num_tokens) for row in plan.rows]
