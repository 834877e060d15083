"""What sharing saves: blocks and tokens/s of samples, beams, common beginnings, and pressure.

    python -m benchmarks.speed.sharing              SmolLM2, every part; ten minutes on two cores
    python -m benchmarks.speed.sharing --only NAME  one part, a minute or two
    python -m benchmarks.speed.sharing --quick      few requests, for a look at the form

Every figure stands beside the same work with sharing off, in the same run. Decode rates leave
prefill out: a run of many tokens less a run of one. `compiled` counts programs that a measured
run had to compile: where it isn't 0, a second run says more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common.report import first_line, save
from benchmarks.common.sharegpt import load_sample, quick_sample
from benchmarks.common.timing import Disturbed, longer_less_shorter
from jaxpage import LLM, BeamSearchParams, SamplingParams, load
from jaxpage.engine import prefix_groups

OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 2048, "block_size": 16}
SYSTEM = "You are a careful assistant who answers in short and simple words. "
MOST_ROWS = 64
Prompts = list[list[int]]
Rows = list[dict[str, Any]]


def main() -> None:
    parts = {
        "samples": samples, "workload": workload, "beams": beams, "prefix": shared_decode,
        "where": where_it_pays, "hit": system_prompt_hit, "pressure": pressure,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only", choices=tuple(parts))
    args = parser.parse_args()
    config, params, tokenizer = load(args.model, dtype="float32")
    assert tokenizer is not None, "the prompts are text"
    model = {"config": config, "params": params, "tokenizer": tokenizer, **OPTIONS}
    model["attention"] = args.attention
    model["max_model_len"] = min(model["max_model_len"], config.max_position_embeddings)
    items = quick_sample() if args.quick else load_sample(64)
    prompts = [tokenizer.encode(item.prompt)[:512] for item in items]
    record = {}
    for name, part in parts.items():
        if args.only in (None, name):
            start = time.perf_counter()
            record[name] = part(model, prompts, quick=args.quick)
            for row in record[name]:
                print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    name = "sharing" if args.only is None else f"sharing_{args.only}"
    save(name, record, is_quick=args.quick)


def samples(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """n samples of each of a few prompts, all at once, against n requests that share nothing."""
    prompts, tokens = (prompts, 8) if quick else (prompts[:8], 32)
    return [
        {"n": n, **against_apart(model, prompts, n, tokens)}
        for n in ((1, 2) if quick else (1, 2, 4, 6))
    ]


def workload(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """48 prompts with 4 samples each, more than run at once."""
    prompts, tokens = (prompts, 8) if quick else (prompts[:48], 64)
    return [{"prompts": len(prompts), "n": 4, **against_apart(model, prompts, 4, tokens)}]


def against_apart(model: dict[str, Any], prompts: Prompts, n: int, tokens: int) -> dict[str, float]:
    settings = SamplingParams(n=n, temperature=0.9, seed=1, max_tokens=tokens, ignore_eos=True)
    one = timed(model, prompts, settings)
    apart = [prompt for prompt in prompts for _ in range(n)]
    alone = timed(model, apart, replace(settings, n=1), enable_prefix_caching=False)
    return {**compared(one, alone), "arithmetic": most_blocks(prompts, n, tokens, model)}


def most_blocks(prompts: Prompts, n: int, tokens: int, model: dict[str, Any]) -> int:
    """Blocks of the largest groups that run at once, each with its full prompt blocks once."""
    size = model["block_size"]
    needs = []
    for prompt in prompts:
        shared = len(prompt) // size
        own = -(-(len(prompt) + tokens) // size) - shared
        needs.append(shared + n * own)
    return sum(sorted(needs)[-(MOST_ROWS // n) :])


def beams(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """Beams that share blocks, against as many independent sequences (which no beam could be)."""
    rows = []
    prompts, tokens = (prompts, 8) if quick else (prompts[:8], 32)
    for width in (2,) if quick else (2, 4, 6):
        beam = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        apart = [prompt for prompt in prompts for _ in range(width)]
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        one = timed(model, prompts, beam)
        alone = timed(model, apart, greedy, enable_prefix_caching=False)
        rows.append({"width": width, **compared(one, alone)})
    return rows


def shared_decode(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """16 rows behind one system prompt, the shared blocks read once a step or once a row."""
    del prompts
    count, length, new = (4, 80, 8) if quick else (16, 1000, 32)
    rows = []
    for attention in ("xla",) if quick else dict.fromkeys(("xla", model["attention"])):
        llms = switched({**model, "attention": attention})
        work = behind(model, count, length)
        row: dict[str, Any] = {"attention": attention, "rows": count, "shared_tokens": length}
        rows.append({**row, **on_and_off(llms, work, new, rounds=1 if quick else 3)})
        for llm in llms.values():
            llm.close()
    return rows


def where_it_pays(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """The same by rows and shared tokens, however few: the reason for MIN_SHARED_TOKENS."""
    del prompts
    least, prefix_groups.MIN_SHARED_TOKENS = prefix_groups.MIN_SHARED_TOKENS, model["block_size"]
    llms = switched({**model, "attention": "xla"})
    rows = []
    for count in (2,) if quick else (2, 4, 16):
        for length in (64,) if quick else (32, 64, 128, 256, 512):
            found = on_and_off(llms, behind(model, count, length), 4 if quick else 16, rounds=3)
            rows.append({"rows": count, "shared_tokens": length, **found})
    prefix_groups.MIN_SHARED_TOKENS = least
    for llm in llms.values():
        llm.close()
    return rows


def switched(model: dict[str, Any]) -> dict[str, LLM]:
    """Two engines that differ in shared-prefix decode alone."""
    limits = {**model, "max_num_seqs": 16, "num_blocks": 400}
    return {name: LLM(**limits, shared_prefix_decode=name == "on") for name in ("on", "off")}


def behind(model: dict[str, Any], count: int, length: int) -> Prompts:
    """Short questions behind one system prompt of so many tokens."""
    begin = (model["tokenizer"].encode(SYSTEM) * 100)[:length]
    return [[*begin, *model["tokenizer"].encode(f"Number {index} is")] for index in range(count)]


def on_and_off(llms: dict[str, LLM], work: Prompts, new: int, *, rounds: int) -> dict[str, Any]:
    """Decode tokens/s of both engines, taken in turn, and whether their ids are equal.

    The reason in their place where the machine was too busy for a difference.
    """
    once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in llms}
    ids = {}
    for llm in llms.values():
        llm.generate(work[:1], once)  # fills the prefix cache: the others only add their question
        llm.generate(work, replace(once, max_tokens=3))

    def generate(name: str, count: int) -> None:
        params = replace(once, max_tokens=count)
        outputs = llms[name].generate(work, params, raise_on_error=True)
        if count > 1:
            ids[name] = [output.outputs[0].token_ids for output in outputs]

    for _ in range(rounds):
        for name in llms:
            try:
                seconds = longer_less_shorter(partial(generate, name), new)
            except Disturbed as error:
                return {"not measurable": str(error)}
            rates[name].append(len(work) * new / seconds)
    on, off = (statistics.median(rates[name]) for name in ("on", "off"))
    return {
        "on_tok_s": round(on, 1), "off_tok_s": round(off, 1), "ratio": round(on / off, 2),
        "ids": "equal" if ids["on"] == ids["off"] else "DIFFERENT",
    }  # fmt: skip


def system_prompt_hit(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """Time to the first token behind a system prompt: new to the engine, and known to it."""
    del prompts
    work = behind(model, 2, 64 if quick else 500)
    settings = SamplingParams(temperature=0.0, max_tokens=1)
    llm = LLM(**model)
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    cached = {}
    for round_ in range(2 if quick else 6):  # the first one compiles
        llm.reset_prefix_cache()
        for name, prompt in zip(("cold", "hit"), work, strict=True):
            start = time.perf_counter()
            output = llm.generate([prompt], settings, raise_on_error=True)[0]
            if round_:
                times[name].append((time.perf_counter() - start) * 1e3)
            cached[name] = output.num_cached_tokens
    llm.close()
    cold, hit = (statistics.median(times[name]) for name in ("cold", "hit"))
    return [
        {"prompt_tokens": len(work[0]), "cached_tokens": cached["hit"],
         "cold_ttft_ms": round(cold, 1), "hit_ttft_ms": round(hit, 1),
         "ratio": round(cold / hit, 1)}
    ]  # fmt: skip


def pressure(model: dict[str, Any], prompts: Prompts, *, quick: bool) -> Rows:
    """Requests of 100 to 200 tokens in a pool of 40 blocks, against a pool that holds them all."""
    count = 6 if quick else 32
    whole = (prompts * count)[:count]
    work = [(prompt * 60)[: 60 + 2 * (index % 16)] for index, prompt in enumerate(whole)]
    settings = [
        SamplingParams(temperature=0.0, max_tokens=40 + index % 60, ignore_eos=True)
        for index in range(count)
    ]
    rows, expected = [], None
    pools: list[dict[str, Any]] = [
        {"num_blocks": 600},
        {"num_blocks": 40, "preemption": "recompute"},
        {"num_blocks": 40, "preemption": "swap", "swap_blocks": 200},
    ]
    for pool in pools:
        llm = LLM(**model, **pool, max_num_seqs=16)
        start = time.perf_counter()
        ids = [o.outputs[0].token_ids for o in llm.generate(work, settings, raise_on_error=True)]
        seconds = time.perf_counter() - start
        expected = expected or ids
        stats = llm.stats()
        rows.append(
            {**pool, "completed": len(ids), "ids": "equal" if ids == expected else "DIFFERENT",
             "seconds": round(seconds, 1), "peak_blocks": stats.peak_blocks_used,
             "recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap,
             "swapped_out_blocks": stats.swapped_out_blocks}
        )  # fmt: skip
        llm.close()
    return rows


def timed(model: dict[str, Any], prompts: Prompts, params: Any, **options: Any) -> dict[str, float]:
    """Tokens/s and the most blocks in use, after a run of the first few prompts."""
    llm = LLM(**model, max_num_seqs=MOST_ROWS, **options)
    few = MOST_ROWS // max(1, getattr(params, "n", getattr(params, "beam_width", 1)))
    llm.generate(prompts[:few], replace(params, max_tokens=4), raise_on_error=True)
    llm.reset_prefix_cache()
    compiled = llm.stats().num_compilations
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, raise_on_error=True)
    seconds = time.perf_counter() - start
    tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    stats = llm.stats()
    llm.close()
    return {
        "tok_s": tokens / seconds,
        "peak_blocks": stats.peak_blocks_used,
        "saved_blocks": stats.blocks_saved_by_sharing,
        "compiled": stats.num_compilations - compiled,
    }


def compared(one: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    return {
        "tok_s": round(one["tok_s"], 1),
        "apart_tok_s": round(alone["tok_s"], 1),
        "ratio": round(one["tok_s"] / alone["tok_s"], 2),
        "peak_blocks": one["peak_blocks"],
        "apart_peak_blocks": alone["peak_blocks"],
        "saved_blocks": one["saved_blocks"],
        "compiled": one["compiled"] + alone["compiled"],
    }


if __name__ == "__main__":
    main()
