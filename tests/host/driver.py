"""An engine loop around a scheduler and the fake device, that keeps and checks all news."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import pytest

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import Ladder, Request, Scheduler, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.limits import length_limit
from jaxpage.host.planner import least_prefill_tokens
from jaxpage.host.policy import PreemptionCosts
from jaxpage.host.sequence import Status
from jaxpage.outputs import TokenLogprob
from tests.host.fake import VOCAB, FakeDevice, expected, expected_beams, logprob

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@dataclass
class Said:
    """All that one sequence of a request has been told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    raw_sum: float = 0.0
    ends: list[SequenceUpdate] = field(default_factory=list)


@dataclass
class News:
    """All that a request has been told; the attributes of the first sequence are its own."""

    samples: list[Said]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.samples[0].logprobs

    @property
    def raw_sum(self) -> float:
        return self.samples[0].raw_sum

    @property
    def ends(self) -> list[SequenceUpdate]:
        return self.samples[0].ends

    @property
    def is_over(self) -> bool:
        return self.error is not None or all(said.ends for said in self.samples)


class Driver:
    """The engine's loop: dispatches a plan, then reads the one before it (depth 1) or it itself."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        depth: int = 1,
        prefill_ladder: Ladder | None = None,
        costs: PreemptionCosts | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, cache, prefill_ladder=prefill_ladder, costs=costs)
        self.config = config
        self.cache = cache
        self.depth = depth
        self.device = FakeDevice(cache)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.preempted: list[tuple[int, ...]] = []
        """The sequences preempted for each plan, or since the one before it."""
        self.news: dict[str, News] = {}
        self.seq_ids: dict[str, int] = {}
        self._preempted: list[int] = []

    def add(self, request: Request) -> None:
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.seq_ids[request.request_id] = self.device.add(request)
        self.news[request.request_id] = News([Said() for _ in range(request.num_sequences)])
        self.take_news()

    def step(self) -> None:
        plan = self._schedule()
        if plan is None and not self.in_flight:
            assert not self.scheduler.num_running and not self.scheduler.num_waiting, "stalled"
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.preempted.append(tuple(self._preempted))
            self._preempted.clear()
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
        return sum(len(said.ends) for news in self.news.values() for said in news.samples)

    def take_news(self) -> None:
        while self.scheduler.news:
            update = self.scheduler.news.popleft()
            news = self.news[update.request_id]
            said = news.samples[update.sample_index]
            assert not said.ends and news.error is None, f"news after the end: {update}"
            assert update.seq_id == self.seq_ids[update.request_id] + update.sample_index
            said.token_ids += update.new_token_ids
            said.logprobs += update.logprobs
            said.raw_sum += update.raw_logprob_sum
            news.num_preemptions = update.num_preemptions
            news.num_cached_tokens = update.num_cached_tokens
            if update.prompt_logprobs is not None:
                assert news.prompt_logprobs is None, "handed out twice"
                news.prompt_logprobs = update.prompt_logprobs
            if update.finish_reason is not None or update.error is not None:
                assert update.finish_reason is None or update.error is None
                said.ends.append(update)
                news.error = update.error

    def check_done(self, request: Request) -> None:
        """That a request that was left alone has ended as it must, wherever it ran."""
        news = self.news[request.request_id]
        if (request.beam or len(news.samples) > 1) and not self.fits_alone(request):
            assert news.is_over
            if news.error is not None:
                return
        if request.beam is not None:
            self.check_beams(request)
            return
        for index, said in enumerate(news.samples):
            self.check_sample(request, index, said)
        if request.params.prompt_logprobs is None:
            assert news.prompt_logprobs is None
        else:
            self.check_prompt_logprobs(request)

    def fits_alone(self, request: Request) -> bool:
        """Whether all sequences find room in an empty pool, however long they get."""
        news, cache = self.news[request.request_id], self.cache
        num_prompt = len(request.prompt_token_ids)
        longest = length_limit(request, self.config) - 1
        shared = num_prompt // cache.block_size
        own = cache.blocks_for(longest) - shared
        return shared + len(news.samples) * max(own, 1) <= cache.num_blocks

    def check_beams(self, request: Request) -> None:
        news = self.news[request.request_id]
        for said, found in zip(news.samples, expected_beams(request, self.config), strict=True):
            (end,) = said.ends
            assert end.error is None, end.error
            assert (end.new_token_ids, end.score) == (found.token_ids, found.score)
            assert end.raw_logprob_sum == found.logprob_sum
            assert end.finish_reason == ("length" if found.is_at_limit else "stop")

    def check_sample(self, request: Request, index: int, said: Said) -> None:
        want = expected(request, self.config, self.cache, index)
        assert tuple(said.token_ids) == want.token_ids
        (end,) = said.ends
        assert (end.finish_reason, end.stop_reason) == (want.finish_reason, want.stop_reason)
        assert (end.error is not None) == want.is_error
        tokens = [*request.prompt_token_ids, *want.token_ids]
        probs = [
            logprob(tokens[:i], tokens[i])
            for i in range(len(request.prompt_token_ids), len(tokens))
        ]
        assert abs(said.raw_sum - sum(probs)) < 1e-6
        if request.params.logprobs is not None:
            assert [entry.logprob for entry in said.logprobs] == [p / 2 for p in probs]
            assert [entry.token_id for entry in said.logprobs] == list(want.token_ids)
        else:
            assert not said.logprobs

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

    def _schedule(self) -> StepPlan | None:
        """The next plan; notes which sequences were preempted for it."""
        before = [
            (group, group.num_preemptions, [s for s in group.live if s.status is Status.RUNNING])
            for group in self.scheduler._groups.values()
        ]
        plan = self.scheduler.schedule()
        for group, num_preemptions, running in before:
            if group.num_preemptions > num_preemptions:
                self._preempted += [sequence.seq_id for sequence in running]
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        config, rows = self.config, plan.rows
        seen = {row.seq_id for row in rows}
        assert rows and len(seen) == len(rows), "a sequence has two rows"
        is_long = [row.num_tokens > 1 or bool(row.prompt_targets) for row in rows]
        assert is_long == sorted(is_long), f"a decode row after a longer one: {shape(plan)}"
        assert plan.num_single == len(rows) - sum(is_long)
        assert sum(is_long) <= config.max_prefill_rows
        if any(is_long):
            room = least_prefill_tokens(config.max_num_batched_tokens)
            assert plan.num_tokens <= max(config.max_num_batched_tokens, len(rows) - 1 + room)
        assert len(rows) <= config.max_num_seqs
        self._check_blocks(plan)
        busy = {row.seq_id for unread, _ in self.in_flight for row in unread.rows}
        again = [row for row in rows if row.start == 0 and row.seq_id in busy]
        assert not again, f"begins anew before its last step was read: {again}"
        ended = {
            self.seq_ids[name] + index
            for name, news in self.news.items()
            for index, said in enumerate(news.samples)
            if said.ends or news.error is not None
        }
        assert not seen & ended, "a sequence runs after its end"

    def _check_blocks(self, plan: StepPlan) -> None:
        """A block that a row writes is in no other row's table."""
        size = self.cache.block_size
        holders = Counter(block for row in plan.rows for block in row.block_ids)
        for row in plan.rows:
            for block in row.block_ids[row.start // size : self.cache.blocks_for(row.context_len)]:
                assert holders[block] == 1, f"{row.seq_id} writes {block}, which others read"


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
    num_swap_blocks: int = 0,
    preemption: Literal["auto", "recompute", "swap"] = "auto",
    enable_prefix_caching: bool = False,
    costs: PreemptionCosts | None = None,
) -> Driver:
    """An engine without a prefix cache, where a test does not ask for one."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_rows=max_prefill_rows,
        preemption=preemption,
        enable_prefix_caching=enable_prefix_caching,
    )
    cache = CacheConfig(num_blocks, block_size=block_size, num_swap_blocks=num_swap_blocks)
    return Driver(config, cache, depth=depth, prefill_ladder=prefill_ladder, costs=costs)


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % VOCAB for i in range(num_tokens)]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, row.num_tokens) for row in plan.rows]
