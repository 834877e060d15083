"""The host's cost a step, and how well it hides under the device: a stub in the device's place.

    python -m benchmarks.speed.host_overhead           64 rows; targets: 1 ms and 5.3 ms a step
    python -m benchmarks.speed.host_overhead --quick   the same, small

Then a table of the scheduler alone: `schedule()` and `update()` of a decode step with 256 rows
(target 1.5 ms), by rows, pool, waiting requests and shared prefixes, and what it costs to admit a
prompt that the prefix cache holds (4,000 tokens, target 1 ms).

The stub answers after a fixed time, as a device of its own would; the engine plans, builds the
batch, reads, updates and makes text as it always does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass

from benchmarks.common.report import first_line, save, table
from benchmarks.common.timing import Spread
from jaxpage import CacheConfig, EngineConfig, LLMEngine, ModelConfig, SamplingParams
from jaxpage.backends import as_backend
from jaxpage.engine.batch import StepInputBuilder
from jaxpage.engine.requests import RequestFactory
from jaxpage.engine.step_shapes import StepShapes
from jaxpage.host.plan import Request, StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler

PROMPT_TOKENS, CACHED_TOKENS = 100, 4000
DEVICE_S = 5e-3


@dataclass(frozen=True, slots=True)
class StubTicket:
    plan: StepPlan
    ready_s: float


class StubDevice:
    """Steps take `seconds` each, one after another; building the batch is the real thing."""

    def __init__(self, ladders: StepShapes, cache: CacheConfig, seconds: float) -> None:
        self._inputs = StepInputBuilder(ladders, cache)
        self._seconds = seconds
        self._free_s = 0.0

    def dispatch(self, plan: StepPlan) -> StubTicket:
        self._inputs.build(plan)
        self._free_s = max(self._free_s, time.perf_counter()) + self._seconds
        return StubTicket(plan, self._free_s)

    def read(self, ticket: StubTicket) -> StepResult:
        while (left := ticket.ready_s - time.perf_counter()) > 0:
            if left > 1e-3:
                time.sleep(left - 5e-4)
        return answer(ticket.plan)


def answer(plan: StepPlan) -> StepResult:
    """Token 7, whatever was asked."""
    count = len(plan.draws)
    logprobs = [-1.0] * count
    return StepResult(plan.step_id, [7] * count, logprobs, logprobs, ((),) * count)


def setting(rows: int, steps: int) -> tuple[EngineConfig, CacheConfig]:
    cache = CacheConfig(num_blocks=rows * 64, block_size=16)
    return EngineConfig(max_model_len=PROMPT_TOKENS + steps + 10, max_num_seqs=rows), cache


def host_step_seconds(rows: int, steps: int) -> list[float]:
    """Seconds of schedule, batch building and update of each decode step."""
    config, cache = setting(rows, steps)
    scheduler = Scheduler(config, cache)
    builder = StepInputBuilder(StepShapes.of(config, cache, as_backend("xla")), cache)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    prompt = tuple(range(PROMPT_TOKENS))
    for index in range(rows):
        scheduler.add(Request(str(index), prompt, params, seed=index))
    found = []
    while scheduler.has_unfinished:
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        builder.build(plan)
        scheduler.update(plan, answer(plan))
        scheduler.news.clear()
        if len(plan.rows) == rows and plan.num_single == len(plan.rows):
            found.append(time.perf_counter() - start)
    return found


def engine_step_seconds(rows: int, steps: int) -> float:
    """Seconds of an engine step, mean over decode steps, with a device of DEVICE_S."""
    config, cache = setting(rows, steps)
    model = ModelConfig(
        vocab_size=1000,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=config.max_model_len,
    )
    device = StubDevice(StepShapes.of(config, cache, as_backend("xla")), cache, DEVICE_S)
    requests = RequestFactory(None, model, num_token_ids=1000, seed=0)
    engine = LLMEngine(device, Scheduler(config, cache), requests)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for index in range(rows):
        engine.add_request(str(index), list(range(PROMPT_TOKENS)), params)
    while engine.stats().generated_tokens < 2 * rows:
        engine.step()
    start, before = time.perf_counter(), engine.stats().num_steps
    while engine.stats().generated_tokens < rows * (steps - 2):
        engine.step()
    return (time.perf_counter() - start) / (engine.stats().num_steps - before)


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler is measured under."""

    rows: int
    num_blocks: int = 50_000
    num_waiting: int = 0
    num_shared_tokens: int = 0


LOADS = (
    Load(64),
    Load(128),
    Load(256),
    Load(256, num_blocks=5_000),
    Load(256, num_waiting=10_000),
    Load(256, num_shared_tokens=1_000),
)


def scheduler_step_seconds(load: Load, steps: int) -> list[float]:
    """Seconds of `schedule` and `update` of each decode step, one step ahead, all rows running."""
    config = EngineConfig(
        max_model_len=PROMPT_TOKENS + load.num_shared_tokens + 2 * steps + 100,
        max_num_seqs=load.rows,
        max_num_batched_tokens=8192,
        max_prefill_rows=64,
    )
    scheduler = Scheduler(config, CacheConfig(num_blocks=load.num_blocks, block_size=16))
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    head = tuple(range(load.num_shared_tokens))
    for index in range(load.rows + load.num_waiting):
        own = tuple((index * 7 + i) % 999 for i in range(PROMPT_TOKENS))
        scheduler.add(Request(str(index), head + own, params, seed=index))
    found: list[float] = []
    unread: StepPlan | None = None
    while len(found) < steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        taken = time.perf_counter() - start
        assert plan is not None
        if unread is not None:
            result = answer(unread)
            start = time.perf_counter()
            scheduler.update(unread, result)
            scheduler.news.clear()
            taken += time.perf_counter() - start
        if len(plan.rows) == load.rows and plan.num_single == len(plan.rows):
            found.append(taken)
        unread = plan
    return found


def admission_seconds(num_tokens: int, repeats: int) -> list[float]:
    """Seconds of the `schedule` that admits a prompt all of whose blocks are cached."""
    config = EngineConfig(max_model_len=num_tokens + 8, max_num_batched_tokens=num_tokens)
    scheduler = Scheduler(config, CacheConfig(num_blocks=50_000, block_size=16))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompt = tuple(range(num_tokens))
    found: list[float] = []
    for index in range(repeats + 1):
        scheduler.add(Request(str(index), prompt, params, seed=0))
        start = time.perf_counter()
        plan = scheduler.schedule()
        found.append(time.perf_counter() - start)
        while plan is not None:
            scheduler.update(plan, answer(plan))
            plan = scheduler.schedule()
        scheduler.news.clear()
    assert scheduler.counters.prefix_hit_tokens >= repeats * (num_tokens - 17)
    return found[1:]


def scheduler_table(*, is_quick: bool) -> tuple[list[dict[str, float]], float]:
    """(the scheduler's median milliseconds a step by load, those of admitting cached tokens)."""
    steps = 8 if is_quick else 100
    rows = [
        {**asdict(load), "median_ms": 1e3 * statistics.median(scheduler_step_seconds(load, steps))}
        for load in LOADS[: 1 if is_quick else None]
    ]
    admission = admission_seconds(CACHED_TOKENS, 3 if is_quick else 50)
    return rows, 1e3 * statistics.median(admission)


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows, steps = (4, 12) if args.quick else (args.rows, args.steps)
    host = Spread(tuple(s * 1e3 for s in sorted(host_step_seconds(rows, steps))))
    engine = [engine_step_seconds(rows, steps) * 1e3 for _ in range(1 if args.quick else 3)]
    scheduler, admission_ms = scheduler_table(is_quick=args.quick)
    record = {"rows": rows, "host_ms": host.median, "engine_ms": engine,
              "scheduler": [*scheduler, {"admission_ms": admission_ms}]}  # fmt: skip
    lines = [
        f"{rows} rows, schedule + batch + update: {host} ms a step (target 1)",
        f"engine step over a device of {DEVICE_S * 1e3:.1f} ms: "
        f"{statistics.median(engine):.2f} ms (target 5.3)",
        "",
        *table(
            ("rows", "blocks", "waiting", "shared tokens", "schedule + update, ms a step (median)"),
            [tuple(row.values()) for row in scheduler],
        ),
        "",
        f"admission of {CACHED_TOKENS:,} cached tokens: {admission_ms:.2f} ms (target 1)",
    ]
    save("host_overhead", record, lines=lines, is_quick=args.quick)


if __name__ == "__main__":
    main()
