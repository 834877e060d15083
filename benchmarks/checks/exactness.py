"""The same tokens, whatever is shared, evicted, swapped, recomputed or run beside them.

    python -m benchmarks.checks.exactness --model tests/tiny/model   the whole grid, 360 settings
    python -m benchmarks.checks.exactness           SmolLM2: all pairs of values meet
    python -m benchmarks.checks.exactness --quick   a handful of settings

16 requests: greedy, three seeded samples, four beams, in turn. Each setting must give the ids
that every request has alone, in a large pool, with nothing cached. One device pool and one set
of programs a block size: all else is the host's, which a setting has its own of.

A small pool is what the largest request takes alone. Requests grow by more blocks than admission
keeps free for them, so that they make each other give way; where a way to give way, or a kind in
it, was never seen, nothing is proved, and the exit code is 1 as for a difference.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks.common.report import first_line, save
from benchmarks.common.sharegpt import load_sample, quick_sample
from jaxpage import LLM, BeamSearchParams, SamplingParams, load
from jaxpage.config import CacheConfig
from jaxpage.engine.engine import LLMEngine
from jaxpage.host.plan import StepPlan
from jaxpage.host.scheduler import Scheduler
from jaxpage.host.sequence import Status

WHOLE = 256
"""Tokens of a step that hold any prompt here whole."""
LARGEST_POOL_TOKENS = 8192
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 64, 12
"""Outputs as long as two of the largest blocks: admission keeps one free for each row to grow."""
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
QUICK = [
    Setting(*each, 8) for each in itertools.product(*VALUES[:2], (True,), (1,), VALUES[4][::2])
]
"""All pools and ways to give way in them, in the orders in which all kinds do."""


@dataclass(slots=True)
class Tally:
    """What was seen over all settings."""

    settings: int = 0
    outputs: int = 0
    different: int = 0
    recomputed: int = 0
    swapped: int = 0
    swapped_blocks: int = 0
    hit_tokens: int = 0
    gave_way: Counter[str] = field(default_factory=Counter)
    """By how and kind."""
    never_pressed: list[str] = field(default_factory=list)
    """Small pools in which nobody gave way as the setting says, though others ran beside."""

    @property
    def unseen(self) -> list[str]:
        """What a grid of small pools should have met and did not."""
        ways = itertools.product(VALUES[1], KINDS)
        return [_way(*each) for each in ways if not self.gave_way[_way(*each)]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting gave."""

    ids: Ids
    peak_blocks: int
    recomputed: int
    swapped: int
    swapped_blocks: int
    hit_tokens: int
    gave_way: Counter[str]


class Watched(Scheduler):
    """Counts who gave way, by how and kind; a request's id is its place in the work."""

    gave_way: Counter[str]

    def schedule(self) -> StepPlan | None:
        before = {name: group.num_preemptions for name, group in self._groups.items()}
        plan = super().schedule()
        for name, group in self._groups.items():
            if group.num_preemptions > before[name]:
                is_swap = any(each.status is Status.SWAPPED for each in group.live)
                mode = "swap" if is_swap else "recompute"
                self.gave_way[_way(mode, KINDS[int(name) % len(KINDS)])] += 1
        return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--pairwise", action="store_true", help="not the whole grid of a model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    config, params, tokenizer = load(args.model, dtype="float32")
    assert tokenizer is not None, "the prompts are text"
    model = {"config": config, "params": params, "tokenizer": tokenizer}
    model["attention"] = args.attention
    items = quick_sample() if args.quick else load_sample(16)
    prompts = [tokenizer.encode(item.prompt) for item in items]
    work = make_work(prompts, QUICK_OUTPUT_TOKENS if args.quick else OUTPUT_TOKENS)
    settings = QUICK if args.quick else list(map(Setting._make, itertools.product(*VALUES)))
    if not args.quick and (args.pairwise or args.model == parser.get_default("model")):
        settings = pairwise(settings)
    start = time.perf_counter()
    tally, different = compare(model, work, settings)
    print(*report_lines(tally, different, time.perf_counter() - start), sep="\n")
    figures = {name: getattr(tally, name) for name in Tally.__slots__}
    record = {"model": args.model, **figures}
    save("exactness", record, is_quick=args.quick)
    if tally.different or tally.unseen:
        raise SystemExit(1)


def report_lines(tally: Tally, different: list[tuple[Setting, str]], seconds: float) -> list[str]:
    """What differs, what gave way how often, and what was never seen."""
    lines = [f"DIFFERENT {kind} {setting}" for setting, kind in different]
    lines += [f"never pressed: {setting}" for setting in tally.never_pressed]
    lines += [f"NEVER SEEN: {way}" for way in tally.unseen]
    return [
        *lines,
        f"{tally.settings} settings x {len(KINDS)} kinds, {seconds:.0f} s: "
        f"{tally.outputs} outputs compared, {tally.different} differences",
        f"preemptions {tally.recomputed} recompute, {tally.swapped} swap "
        f"({tally.swapped_blocks} blocks); prefix hits {tally.hit_tokens} tokens",
        ", ".join(f"{way} {count}" for way, count in sorted(tally.gave_way.items())),
    ]


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

    Small pools also meet every answer to them in every order, and beside others at every block
    size, so that all kinds of pressure occur.
    """

    def pairs(setting: Setting) -> set[tuple[Any, ...]]:
        pressed: set[tuple[Any, ...]] = {(*setting[:2], setting.order)}
        if setting.order != "alone":
            pressed.add((*setting[:2], setting.block_size))
        return {*pressed, *itertools.combinations(enumerate(setting), 2)}

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
        plain = Setting("large", "recompute", False, size, "alone", WHOLE)
        found = run(llm, work, plain, num_blocks)
        expected = expected or found.ids
        tight = found.peak_blocks
        different += [(plain, kind) for kind in add_to(tally, plain, found, expected)]
        for setting in group:
            if setting != plain:
                found = run(llm, work, setting, tight if setting.pool == "small" else num_blocks)
                different += [(setting, kind) for kind in add_to(tally, setting, found, expected)]
        llm.close()
    return tally, different


def add_to(tally: Tally, setting: Setting, found: Outcome, expected: Ids) -> list[str]:
    """The kinds that differ; all else that was found goes into the tally."""
    wrong = [index for index, ids in enumerate(found.ids) if ids != expected[index]]
    tally.settings += 1
    tally.outputs += sum(map(len, found.ids))
    tally.different += len(wrong)
    tally.recomputed += found.recomputed
    tally.swapped += found.swapped
    tally.swapped_blocks += found.swapped_blocks
    tally.hit_tokens += found.hit_tokens
    tally.gave_way += found.gave_way
    seen = found.swapped if setting.preemption == "swap" else found.recomputed
    if setting.pool == "small" and setting.order != "alone" and not seen:
        tally.never_pressed.append(str(setting))
    return sorted({KINDS[index % len(KINDS)] for index in wrong})


def run(llm: LLM, work: Work, setting: Setting, num_blocks: int) -> Outcome:
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
    num_swap_blocks = num_blocks if setting.preemption == "swap" else 0
    cache = CacheConfig(num_blocks, setting.block_size, num_swap_blocks)
    scheduler = Watched(config, cache, prefill_ladder=llm.runner.shapes.prefill_tokens)
    scheduler.gave_way = Counter()
    engine = LLMEngine(llm.runner, scheduler, llm._engine.requests)
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
    return Outcome(
        ids=[done[index] for index in order],
        peak_blocks=stats.peak_blocks_used,
        recomputed=stats.preemptions_recompute,
        swapped=stats.preemptions_swap,
        swapped_blocks=stats.swapped_out_blocks,
        hit_tokens=stats.prefix_hit_tokens,
        gave_way=scheduler.gave_way,
    )


def _way(mode: str, kind: str) -> str:
    return f"{mode} of {kind}"


if __name__ == "__main__":
    main()
