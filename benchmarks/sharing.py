"""What sharing saves: blocks and tokens/s of samples, beams, common beginnings, and pressure.

    python -m benchmarks.sharing           SmolLM2; a few minutes
    python -m benchmarks.sharing --quick   few requests, for a look at the form

Every figure stands beside the same work with sharing off, in the same run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.report import first_line, save
from benchmarks.throughput import quick_sample
from benchmarks.workload import load_sample
from jaxpage import LLM, BeamSearchParams, SamplingParams, load

OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 2048, "block_size": 16}
SYSTEM = "You are a careful assistant who answers in short and simple words. "
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only", choices=("samples", "beams", "prefix", "hit", "pressure"))
    args = parser.parse_args()
    config, params, tokenizer = load(args.model, dtype="float32")
    model = {"config": config, "params": params, "tokenizer": tokenizer, **OPTIONS}
    model["attention"] = args.attention
    model["max_model_len"] = min(model["max_model_len"], config.max_position_embeddings)
    items = quick_sample() if args.quick else load_sample(16)
    prompts = [tokenizer.encode(item.prompt)[:128] for item in items]
    parts = {
        "samples": lambda: samples(model, prompts, quick=args.quick),
        "beams": lambda: beams(model, prompts, quick=args.quick),
        "prefix": lambda: shared_decode(model, quick=args.quick),
        "hit": lambda: system_prompt_hit(model, quick=args.quick),
        "pressure": lambda: pressure(model, prompts, quick=args.quick),
    }
    record = {}
    for name, part in parts.items():
        if args.only in (None, name):
            record[name] = part()
            for row in record[name]:
                print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ")
    print("wrote", save(f"sharing{'_quick' * args.quick}", record))


def samples(model: dict[str, Any], prompts: list[list[int]], *, quick: bool) -> Rows:
    """n samples of each prompt as one request, against n requests that share nothing."""
    rows = []
    for n in (1, 2) if quick else (1, 2, 4, 6):
        settings = SamplingParams(
            n=n, temperature=0.9, seed=1, max_tokens=8 if quick else 64, ignore_eos=True
        )
        one = timed(model, prompts, settings)
        apart = [prompt for prompt in prompts for _ in range(n)]
        alone = timed(model, apart, replace(settings, n=1), enable_prefix_caching=False)
        rows.append({"n": n, **compared(one, alone)})
    return rows


def beams(model: dict[str, Any], prompts: list[list[int]], *, quick: bool) -> Rows:
    """Beams that share blocks, against as many independent sequences (which no beam could be)."""
    rows = []
    tokens = 8 if quick else 64
    for width in (2,) if quick else (2, 4, 6):
        beam = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        apart = [prompt for prompt in prompts for _ in range(width)]
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        one = timed(model, prompts, beam)
        alone = timed(model, apart, greedy, enable_prefix_caching=False)
        rows.append({"width": width, **compared(one, alone)})
    return rows


def shared_decode(model: dict[str, Any], *, quick: bool) -> Rows:
    """16 rows behind one system prompt, the shared blocks read once a step or once a row."""
    tokenizer = model["tokenizer"]
    count, length, new = (4, 64, 8) if quick else (16, 1000, 64)
    begin = (tokenizer.encode(SYSTEM) * 100)[:length]
    prompts = [[*begin, *tokenizer.encode(f"Number {index} is")] for index in range(count)]
    settings = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    rows = []
    for attention in ("xla", model["attention"]):
        for is_on in (True, False):
            llm = LLM(**{**model, "attention": attention}, shared_prefix_decode=is_on)
            llm.generate(prompts, settings)  # compiles, and fills the prefix cache
            start = time.perf_counter()
            outputs = llm.generate(prompts, settings, raise_on_error=True)
            seconds = time.perf_counter() - start
            ids = [output.outputs[0].token_ids for output in outputs]
            rows.append(
                {"attention": attention, "shared": is_on, "tok_s": round(count * new / seconds, 1),
                 "ids": hash(tuple(ids))}
            )  # fmt: skip
            llm.close()
    return rows


def system_prompt_hit(model: dict[str, Any], *, quick: bool) -> Rows:
    """Time to the first token behind a system prompt: new to the engine, and known to it."""
    tokenizer = model["tokenizer"]
    begin = (tokenizer.encode(SYSTEM) * 50)[: 64 if quick else 500]
    prompts = [[*begin, *tokenizer.encode(text)] for text in ("What is rain?", "Who are you?")]
    settings = SamplingParams(temperature=0.0, max_tokens=1)
    llm = LLM(**model)
    for prompt in prompts:  # every program that is wanted
        llm.generate([prompt], settings)
    llm.reset_prefix_cache()
    rows = []
    for name, prompt in zip(("cold", "hit"), prompts, strict=True):
        start = time.perf_counter()
        output = llm.generate([prompt], settings, raise_on_error=True)[0]
        milliseconds = (time.perf_counter() - start) * 1e3
        rows.append({"request": name, "cached_tokens": output.num_cached_tokens,
                     "ttft_ms": round(milliseconds, 1)})  # fmt: skip
    llm.close()
    return rows


def pressure(model: dict[str, Any], prompts: list[list[int]], *, quick: bool) -> Rows:
    """Requests of 100 to 200 tokens in a pool of 40 blocks, against a pool that holds them all."""
    count = 6 if quick else 32
    whole = (prompts * count)[:count]
    work = [prompt[: 60 + 2 * (index % 16)] for index, prompt in enumerate(whole)]
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
        ids = [o.outputs[0].token_ids for o in llm.generate(work, settings, raise_on_error=True)]
        expected = expected or ids
        stats = llm.stats()
        rows.append(
            {**pool, "ids": "equal" if ids == expected else "DIFFERENT",
             "recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap,
             "swapped_out_blocks": stats.swapped_out_blocks}
        )  # fmt: skip
        llm.close()
    return rows


def timed(
    model: dict[str, Any], prompts: list[list[int]], params: Any, **options: Any
) -> dict[str, float]:
    """Tokens/s of a second run, with all programs there, and the most blocks in use."""
    llm = LLM(**model, **options)
    llm.generate(prompts, params, raise_on_error=True)
    llm.reset_prefix_cache()
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
    }


def compared(one: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    return {
        "tok_s": round(one["tok_s"], 1),
        "apart_tok_s": round(alone["tok_s"], 1),
        "peak_blocks": one["peak_blocks"],
        "apart_peak_blocks": alone["peak_blocks"],
        "saved_blocks": one["saved_blocks"],
    }


if __name__ == "__main__":
    main()
