"""What `benchmarks.speed.two_builds` runs in each of its two trees: jobs in, figures out.

Standard library and the public names of jaxpage only, since it also runs on older trees: it is
started as a file, from the root of the tree that it is to run. One JSON object on standard input
(`model`, `attention`, `prompts`, `lengths`, `long_prompt`, `stream_prompt`, `stream_tokens`,
`repeats`), one on standard output; a figure is the median of the repeats.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jaxpage
from jaxpage import LLM, BeamSearchParams, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(
        job["model"],
        dtype="float32",
        attention=job["attention"],
        kv_memory=job["kv_memory"],
        max_num_seqs=64,
        enable_prefix_caching=False,  # repeats have the same prompts
        seed=0,
    )
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "batch": lambda: batch(llm, job["prompts"], job["lengths"]),
        "stream": lambda: stream(llm, job["stream_prompt"], job["stream_tokens"]),
        "prefill": lambda: prefill(llm, job["long_prompt"]),
    }
    figures: dict[str, float] = {}
    for measure in measures.values():
        measure()  # compiles
        runs = [measure() for _ in range(job["repeats"])]
        figures |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    mixed(llm, job["prompts"])
    figures["programs"] = llm.stats().num_compilations
    print(json.dumps({"jaxpage": jaxpage.__file__, "figures": figures}))


def batch(llm: LLM, prompts: list[str], lengths: list[int]) -> dict[str, float]:
    """Tokens a second of all prompts at once, and the host's milliseconds a step of it."""
    before, start = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, [_forced(length) for length in lengths], raise_on_error=True)
    seconds, after = time.perf_counter() - start, llm.stats()
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    host_s = after.host_seconds - before.host_seconds
    return {
        "batch": sum(lengths) / seconds,
        "host": host_s * 1e3 / (after.num_steps - before.num_steps),
    }


def stream(llm: LLM, prompt: list[int], num_tokens: int) -> dict[str, float]:
    """Tokens a second of one request, from its first token on."""
    output = llm.generate(prompt, _forced(num_tokens + 1), raise_on_error=True)[0]
    metrics = output.metrics
    assert metrics is not None and metrics.finish_s and metrics.first_token_s
    return {"stream": num_tokens / (metrics.finish_s - metrics.first_token_s)}


def prefill(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Prompt tokens a second."""
    start = time.perf_counter()
    llm.generate(prompt, _forced(1), raise_on_error=True)
    return {"prefill": len(prompt) / (time.perf_counter() - start)}


def mixed(llm: LLM, prompts: list[str]) -> None:
    """A few requests of each kind together, for the programs that they take."""
    kinds: list[Any] = [
        _forced(8),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=8),
        SamplingParams(n=3, temperature=0.9, top_k=40, seed=2, max_tokens=8),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=8, logprobs=5),
        SamplingParams(temperature=0.7, logit_bias={9: 2.0}, seed=3, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1),
        BeamSearchParams(beam_width=4, max_tokens=8),
    ]
    for count in (1, len(kinds), 2 * len(kinds)):
        params = [kinds[index % len(kinds)] for index in range(count)]
        asked = [prompts[index % len(prompts)] for index in range(count)]
        llm.generate(asked, params, raise_on_error=True)


def _forced(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    main()
