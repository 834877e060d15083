"""The same tokens, whatever is shared, evicted, swapped, recomputed or run beside them.

    python -m benchmarks.exactness --model tests/tiny/model   the whole grid, 360 settings
    python -m benchmarks.exactness           SmolLM2: settings in which every pair of values meets
    python -m benchmarks.exactness --quick   a handful of settings

16 requests: greedy, three seeded samples, four beams, in turn. Each setting must give the ids
that every request has alone, in a large pool, with nothing cached. One device pool and one set
of programs a block size: all else is the host's, which a setting has its own of.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.report import first_line, save
from benchmarks.throughput import quick_sample
from benchmarks.workload import load_sample
from jaxpage import LLM, BeamSearchParams, SamplingParams, load
from jaxpage.config import CacheConfig
from jaxpage.engine.engine import LLMEngine
from jaxpage.host.scheduler import Scheduler
from jaxpage.outputs import EngineStats

WHOLE = 256
"""Tokens of a step that hold any prompt here whole."""
LARGEST_POOL_TOKENS = 8192
LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": WHOLE,
    "seed": 0, "swap_blocks": LARGEST_POOL_TOKENS,
}  # fmt: skip
KINDS = ("greedy", "seeded n=3", "beam 4")
Work = list[tuple[list[int], SamplingParams | BeamSearchParams]]
Ids = list[list[tuple[int, ...]]]


class Setting(NamedTuple):
    """One point of the grid."""

    pool: str
    preemption: str
    caching: bool
    block_size: int
    order: str
    chunk: int


VALUES: tuple[tuple[Any, ...], ...] = (
    ("large", "small"),
    ("recompute", "swap"),
    (True, False),
    (16, 1, 4, 32, 7),
    ("batch", "alone", "reversed"),
    (WHOLE, 64, 8),
)


@dataclass(slots=True)
class Tally:
    """What was seen over all settings."""

    settings: int = 0
    outputs: int = 0
    different: int = 0
    recomputed: int = 0
    swapped: int = 0
    hit_tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--pairwise", action="store_true", help="not the whole grid of a model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    config, params, tokenizer = load(args.model, dtype="float32")
    model = {"config": config, "params": params, "tokenizer": tokenizer}
    model["attention"] = args.attention
    items = quick_sample() if args.quick else load_sample(16)
    work = make_work([tokenizer.encode(item.prompt) for item in items], 6 if args.quick else 12)
    settings = list(map(Setting._make, itertools.product(*VALUES)))
    if args.quick or args.pairwise or args.model == parser.get_default("model"):
        settings = pairwise(settings)
    if args.quick:
        settings = [each for each in settings if each.block_size == VALUES[3][0]]
    start = time.perf_counter()
    tally, different = compare(model, work, settings)
    for setting, kind in different:
        print("DIFFERENT", kind, setting)
    print(f"{len(settings)} settings x {len(KINDS)} kinds, {time.perf_counter() - start:.0f} s: "
          f"{tally.outputs} outputs compared, {tally.different} differences")  # fmt: skip
    print(f"preemptions {tally.recomputed} recompute, {tally.swapped} swap; "
          f"prefix hits {tally.hit_tokens} tokens")  # fmt: skip
    record = {name: getattr(tally, name) for name in Tally.__slots__}
    print("wrote", save(f"exactness{'_quick' * args.quick}", record))
    if tally.different:
        raise SystemExit(1)


def make_work(prompts: list[list[int]], tokens: int) -> Work:
    """The kinds in turn; every other request begins as the first one does."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    work: Work = []
    for index, prompt in enumerate(prompts):
        own = prompt[: 24 + index]
        ids = own if index % 2 else [*prompts[0][:20], *own[:16]]
        seeded = replace(greedy, temperature=0.9, top_p=0.95, n=3, seed=index)
        work.append(
            (ids, (greedy, seeded, BeamSearchParams(beam_width=4, max_tokens=tokens))[index % 3])
        )
    return work


def pairwise(settings: list[Setting]) -> list[Setting]:
    """Few settings in which every two values of different axes meet; greedily chosen.

    Small pools also meet every answer to them in every order, so that all kinds of pressure occur.
    """

    def pairs(setting: Setting) -> set[tuple[Any, ...]]:
        pressed = ("pressed", setting.pool, setting.preemption, setting.order)
        return {pressed, *itertools.combinations(enumerate(setting), 2)}

    missing = set().union(*map(pairs, settings))
    chosen = []
    while missing:
        best = max(settings, key=lambda setting: len(pairs(setting) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def compare(
    model: dict[str, Any], work: Work, settings: list[Setting]
) -> tuple[Tally, list[tuple[Setting, str]]]:
    """What came out over all settings, and which kinds of which differ."""
    tally, different, expected = Tally(), [], None
    by_size = sorted(settings, key=lambda each: VALUES[3].index(each.block_size))
    for size, group in itertools.groupby(by_size, key=lambda each: each.block_size):
        num_blocks = -(-LARGEST_POOL_TOKENS // size)
        llm = LLM(**model, **LIMITS, block_size=size, num_blocks=num_blocks)
        if expected is None:
            expected = run(llm, work, Setting("large", "recompute", False, size, "alone", WHOLE))[0]
        for setting in group:
            got, stats = run(llm, work, setting)
            wrong = [index for index, ids in enumerate(got) if ids != expected[index]]
            kinds = sorted({KINDS[index % len(KINDS)] for index in wrong})
            different += [(setting, kind) for kind in kinds]
            tally.settings += 1
            tally.outputs += sum(map(len, got))
            tally.different += len(wrong)
            tally.recomputed += stats.preemptions_recompute
            tally.swapped += stats.preemptions_swap
            tally.hit_tokens += stats.prefix_hit_tokens
        llm.close()
    return tally, different


def run(llm: LLM, work: Work, setting: Setting) -> tuple[Ids, EngineStats]:
    """The ids of every request, in the work's order, whatever order they came in."""
    order = list(range(len(work)))
    batches: Iterable[list[int]] = [order]
    if setting.order == "alone":
        batches = [[index] for index in order]
    elif setting.order == "reversed":
        batches = [order[::-1]]
    config = replace(
        llm.engine_config,
        preemption=setting.preemption,
        enable_prefix_caching=setting.caching,
        max_num_batched_tokens=setting.chunk,
    )
    size = setting.block_size
    num_blocks = llm.cache_config.num_blocks
    if setting.pool == "small":
        num_blocks = max(most_blocks(*each, size) for each in work) + 2
    cache = CacheConfig(num_blocks, size, num_blocks if setting.preemption == "swap" else 0)
    ladder = llm.runner.ladders.prefill_tokens
    scheduler = Scheduler(config, cache, prefill_ladder=ladder)
    engine = LLMEngine(llm.runner, scheduler, llm._requests)
    done: dict[int, list[tuple[int, ...]]] = {}
    for batch in batches:
        for index in batch:
            engine.add_request(str(index), *work[index])
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None, (setting, output)
                if output.finished:
                    done[int(output.request_id)] = [each.token_ids for each in output.outputs]
        scheduler.check_integrity()
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total, (setting, stats)
    return [done[index] for index in order], stats


def most_blocks(prompt: list[int], params: SamplingParams | BeamSearchParams, size: int) -> int:
    """Blocks of one request at its end, with nothing shared but the prompt's full blocks."""
    is_beam = isinstance(params, BeamSearchParams)
    count = params.beam_width if is_beam else params.num_sequences
    shared = len(prompt) // size
    longest = len(prompt) + (params.max_tokens or 0)
    return shared + count * (-(-longest // size) - shared)


if __name__ == "__main__":
    main()
