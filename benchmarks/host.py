"""The host's cost a step, and how well it hides under the device: a stub in the device's place.

    python -m benchmarks.host           64 rows; targets: under 1 ms a step, at most 5.3 ms a step
    python -m benchmarks.host --quick   with a device of 5 ms

The stub answers after a fixed time, as a device of its own would; the engine plans, builds the
batch, reads, updates and makes text as it always does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from benchmarks.report import Spread, first_line, save
from jaxpage import CacheConfig, EngineConfig, LLMEngine, ModelConfig, SamplingParams
from jaxpage.engine.batch import Ladders, StepInputBuilder
from jaxpage.engine.requests import RequestFactory
from jaxpage.host.plan import Request, StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler

PROMPT_TOKENS = 100
DEVICE_S = 5e-3


@dataclass(frozen=True, slots=True)
class StubTicket:
    plan: StepPlan
    ready_s: float


class StubDevice:
    """Steps take `seconds` each, one after another; building the batch is the real thing."""

    def __init__(self, ladders: Ladders, cache: CacheConfig, seconds: float) -> None:
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
    builder = StepInputBuilder(Ladders.of(config, cache), cache)
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
        scheduler.take_updates()
        if len(plan.rows) == rows and plan.is_decode:
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
    device = StubDevice(Ladders.of(config, cache), cache, DEVICE_S)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows, steps = (4, 12) if args.quick else (args.rows, args.steps)
    host = Spread(tuple(s * 1e3 for s in sorted(host_step_seconds(rows, steps))))
    engine = [engine_step_seconds(rows, steps) * 1e3 for _ in range(1 if args.quick else 3)]
    print(f"{rows} rows, schedule + batch + update: {host} ms a step (target 1)")
    print(f"engine step over a device of {DEVICE_S * 1e3:.1f} ms: "
          f"{statistics.median(engine):.2f} ms (target 5.3)")  # fmt: skip
    record = {"rows": rows, "host_ms": host.median, "engine_ms": engine}
    print("wrote", save(f"host{'_quick' * args.quick}", record))


if __name__ == "__main__":
    main()
