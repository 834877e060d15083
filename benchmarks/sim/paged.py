"""The project's own scheduler and block manager on a trace: only the device is a stub."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from benchmarks.sim.cost import Site
from benchmarks.sim.lengths import MAX_TOKENS, Job
from benchmarks.sim.outcome import Meter, Outcome
from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.plan import Request, StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler
from jaxpage.sampling_params import SamplingParams

_PREFIX_IDS = 1 << 30
"""Token ids of shared prefixes are multiples of this and above; other prompt tokens are unique."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine is set for a simulation."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    """vLLM's limits at the time of the paper."""
    prefix_caching: bool = False
    swap_bytes: float = 0.0
    preemption: str = "recompute"


@dataclass(slots=True)
class Engine:
    """One real scheduler with its own modelled clock."""

    site: Site
    setting: Setting = field(default_factory=Setting)
    jobs: list[Job] = field(default_factory=list)
    clock: float = 0.0
    meter: Meter = field(default_factory=Meter)
    first_s: list[float | None] = field(default_factory=list)
    finish_s: list[float | None] = field(default_factory=list)
    tokens_computed: int = 0
    blocks_moved: int = 0
    num_done: int = 0
    scheduler: Scheduler = field(init=False)
    _left: dict[str, int] = field(default_factory=dict)
    _next_token: int = 0

    def __post_init__(self) -> None:
        setting, block = self.setting, self.setting.block_size
        self.scheduler = Scheduler(
            EngineConfig(
                max_model_len=MAX_TOKENS,
                max_num_seqs=setting.max_num_seqs,
                max_num_batched_tokens=setting.max_num_batched_tokens,
                max_prefill_rows=setting.max_num_seqs,
                enable_prefix_caching=setting.prefix_caching,
                preemption=setting.preemption,  # pyright: ignore[reportArgumentType]  # one of three
            ),
            CacheConfig(
                num_blocks=self.site.slots // block,
                block_size=block,
                num_swap_blocks=int(setting.swap_bytes // (block * self.site.cost.shape.kv_bytes)),
            ),
        )

    def add(self, job: Job) -> None:
        """Hands a job to the scheduler now."""
        index = len(self.jobs)
        self.jobs.append(job)
        self.first_s.append(None)
        self.finish_s.append(None)
        first = self._next_token
        self._next_token += job.prompt - job.prefix
        shared = _PREFIX_IDS * (job.tenant + 1)
        prompt = (*range(shared, shared + job.prefix), *range(first, self._next_token))
        params = SamplingParams(
            n=job.samples, max_tokens=job.output, ignore_eos=True, detokenize=False
        )
        self._left[str(index)] = job.samples
        self.scheduler.add(Request(str(index), prompt, params, seed=index, arrival_s=job.arrival_s))

    def step(self) -> bool:
        """One plan, its modelled time, its news. False: there was nothing to run."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if plan is None:
            self._take_news()
            return False
        seconds = self._price(plan)
        self.clock += seconds
        scheduler.update(plan, answer(plan))
        blocks = self.blocks
        self.meter.add(
            seconds,
            tokens_per_s=sum(len(row.draws) for row in plan.rows) / seconds,
            batch=scheduler.num_running,
            stored=blocks.pool.num_slots_in_use,
            reserved=blocks.pool.num_slots_allocated,
            saved=blocks.pool.num_saved,
            blocks=blocks.pool.num_slots_allocated / blocks.cache.block_size,
        )
        self._take_news()
        return True

    @property
    def blocks(self) -> BlockManager:
        """Counts that no engine needs, so they are not public."""
        return self.scheduler._state.blocks

    def outcome(self) -> Outcome:
        counters = self.scheduler.counters
        found = {
            name: float(getattr(counters, name))
            for name in dir(counters)
            if not name.startswith("_") and isinstance(getattr(counters, name), int | float)
        }
        found["tokens_computed"] = self.tokens_computed
        found["blocks_moved"] = self.blocks_moved
        return Outcome(self.jobs, self.meter, self.first_s, self.finish_s, self.clock, found)

    def _price(self, plan: StepPlan) -> float:
        """The plan's modelled seconds."""
        tokens = read = attended = 0
        for row in plan.rows:
            count = row.num_tokens
            tokens += count
            read += row.start
            attended += count * row.start + count * count // 2
        moves = plan.moves
        moved = len(moves.swap_in) + len(moves.swap_out)
        self.tokens_computed += tokens
        self.blocks_moved += moved
        kv_bytes = self.site.cost.shape.kv_bytes
        return self.site.cost.seconds(
            tokens=tokens,
            context_tokens=read,
            attended=attended,
            rows=sum(len(row.draws) for row in plan.rows),
            moved_bytes=moved * self.setting.block_size * kv_bytes,
        )

    def _take_news(self) -> None:
        while self.scheduler.news:
            update = self.scheduler.news.popleft()
            index = int(update.request_id)
            if self.first_s[index] is None:
                self.first_s[index] = self.clock
            if update.finish_reason is not None or update.error is not None:
                left = self._left[update.request_id] - 1
                self._left[update.request_id] = left
                self.num_done += not left
                if not left and update.error is None:
                    self.finish_s[index] = self.clock


def paged(
    site: Site, jobs: Seq[Job], setting: Setting | None = None, *, drained: bool = True
) -> Outcome:
    """Runs a trace. `drained=False` stops once nothing waits any more.

    The meter of such a run starts when a quarter of the jobs are done: filling up, when all
    sequences are short, is not what a saturated machine looks like.
    """
    engine, place = Engine(site, setting or Setting()), 0
    is_warm = drained
    while True:
        while place < len(jobs) and jobs[place].arrival_s <= engine.clock:
            engine.add(jobs[place])
            place += 1
        if not is_warm and 4 * engine.num_done >= len(jobs):
            engine.meter, is_warm = Meter(), True
        if not drained and place == len(jobs) and not engine.scheduler.num_waiting:
            break
        if not engine.step():
            if place == len(jobs):
                assert not engine.scheduler.has_unfinished, "stalled"
                break
            engine.clock = max(engine.clock, jobs[place].arrival_s)
    return engine.outcome()


def answer(plan: StepPlan) -> StepResult:
    """To each sample a token of its own: what gave way shares no more than its prompt again."""
    token_ids = [draw.seq_id for row in plan.rows for draw in row.draws]
    logprobs = [-1.0] * len(token_ids)
    return StepResult(plan.step_id, token_ids, logprobs, logprobs, ((),) * len(token_ids))
