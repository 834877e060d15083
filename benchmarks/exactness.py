"""The same tokens, whatever ran beside them: greedy and seeded ids of the real model.

    python -m benchmarks.exactness           16 ShareGPT prompts, 24 tokens each
    python -m benchmarks.exactness --quick   4 prompts, 6 tokens, fewer settings

Every setting (alone, in a batch, reversed, block sizes, a pool that forces preemption, small
prefill steps) must give the ids of the first one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.report import first_line, save
from benchmarks.throughput import quick_sample
from benchmarks.workload import load_sample
from jaxpage import LLM, SamplingParams, load

SHARED: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "seed": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "batch of 16, block size 16": {},
    "block size 1": {"block_size": 1},
    "block size 7": {"block_size": 7},
    "block size 32": {"block_size": 32},
    "prefill steps of 32 tokens": {"max_num_batched_tokens": 32},
    "at most 3 rows": {"max_num_seqs": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    items = quick_sample() if args.quick else load_sample(16)
    new_tokens = 6 if args.quick else 24
    config, params, tokenizer = load(args.model, dtype="float32")
    prompts = [tokenizer.encode(item.prompt)[:200] for item in items]
    sampling = [sampling_of(index, new_tokens) for index in range(len(prompts))]
    model = {"config": config, "params": params, "tokenizer": tokenizer}
    settings = dict(list(SETTINGS.items())[:2]) if args.quick else SETTINGS
    reference = run(model, prompts, sampling, settings["batch of 16, block size 16"])
    verdicts = {"alone": alone(model, prompts, sampling) == reference}
    backwards = run(model, prompts[::-1], sampling[::-1], {})
    verdicts["order reversed"] = backwards[::-1] == reference
    for name, options in settings.items():
        verdicts[name] = run(model, prompts, sampling, options) == reference
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    small = {"num_blocks": -(-longest // 16) + 3}
    verdicts[f"a pool of {small['num_blocks']} blocks"] = (
        run(model, prompts, sampling, small) == reference
    )
    for name, is_equal in verdicts.items():
        print(f"{name}: {'equal' if is_equal else 'DIFFERENT'}")
    print("wrote", save(f"exactness{'_quick' * args.quick}", {"verdicts": verdicts}))
    if not all(verdicts.values()):
        raise SystemExit(1)


def sampling_of(index: int, new_tokens: int) -> SamplingParams:
    """Greedy for even requests, seeded sampling for odd ones."""
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    if index % 2 == 0:
        return greedy
    return replace(greedy, temperature=0.9, top_p=0.95, top_k=50, seed=index)


def run(
    model: dict[str, Any],
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    options: dict[str, Any],
) -> list[tuple[int, ...]]:
    """The ids of every request, in one call."""
    llm = LLM(**model, **{**SHARED, "num_blocks": 512, "max_num_seqs": 16, **options})
    outputs = llm.generate(prompts, sampling, raise_on_error=True)
    preemptions = llm.stats().preemptions_recompute
    if preemptions:
        print(f"{preemptions} preemptions with {options}")
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


def alone(
    model: dict[str, Any], prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[tuple[int, ...]]:
    """The ids of every request in a call of its own."""
    llm = LLM(**model, **{**SHARED, "num_blocks": 512, "max_num_seqs": 16})
    pairs = zip(prompts, sampling, strict=True)
    outputs = [llm.generate([prompt], params)[0] for prompt, params in pairs]
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
