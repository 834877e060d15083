"""48 real prompts in one call, each with its own sampling settings; then again in reverse order.

    python -m benchmarks.checks.mixed_settings           48 ShareGPT prompts, 32 tokens each
    python -m benchmarks.checks.mixed_settings --quick   6 made-up prompts, 4 tokens each

Prints a few of the texts and the engine's counters; both orders must give the same ids.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice

from benchmarks.common.report import first_line, save
from benchmarks.common.sharegpt import first_turns
from jaxpage import LLM, RequestOutput, SamplingParams

NUM_PROMPTS = 48
MOST_CHARACTERS = 600
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SETTINGS = (
    GREEDY,
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=1),
    replace(GREEDY, temperature=1.0, top_k=40, seed=2, logprobs=5),
    replace(GREEDY, temperature=0.8, min_p=0.05, seed=3, presence_penalty=0.5),
    replace(GREEDY, repetition_penalty=1.2, prompt_logprobs=1),
    replace(GREEDY, temperature=0.9, seed=4, logit_bias={198: -5.0}, min_tokens=8),
    replace(GREEDY, stop=("\n\n",), frequency_penalty=0.3),
    replace(GREEDY, temperature=0.6, seed=5, bad_words=("the",), logprobs_mode="processed"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        prompts = quick_prompts()
        settings = [replace(each, max_tokens=4, min_tokens=0) for each in SETTINGS]
    else:
        prompts, settings = real_prompts(), list(SETTINGS)
    params = [settings[index % len(settings)] for index in range(len(prompts))]
    llm = LLM(args.model, dtype="float32", num_blocks=700, max_model_len=512, seed=0)
    outputs = llm.generate(prompts, params, raise_on_error=True)
    backwards = llm.generate(prompts[::-1], params[::-1], raise_on_error=True)[::-1]
    for output in outputs[:4]:
        print(repr((output.prompt or "")[:60]), "->", repr(output.outputs[0].text[:100]))
    is_equal = ids(outputs) == ids(backwards)
    print(f"{len(prompts)} prompts, ids in reverse order: {'equal' if is_equal else 'DIFFERENT'}")
    stats = llm.stats().to_dict()
    print(stats)
    record = {"equal": is_equal, "stats": stats}
    save("mixed_settings", record, is_quick=args.quick)
    if not is_equal:
        raise SystemExit(1)


def real_prompts() -> list[str]:
    """The first short first turns of the package's conversations."""
    texts = (text for _, text in first_turns() if 0 < len(text.strip()) <= MOST_CHARACTERS)
    return list(islice(texts, NUM_PROMPTS))


def quick_prompts() -> list[str]:
    return [f"Request {index} says" for index in range(6)]


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
