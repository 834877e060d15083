"""What `benchmarks.checks.same_bits` runs in each of its two trees: requests in, every bit out.

Standard library and the public names of jaxpage only, since it also runs on older trees: it is
started as a file, from the root of the tree that it is to run. One JSON object on standard input
(`tiny`, the folder of the tiny model; `requests`, how many; `setup`, a name), one on standard
output.

The requests, their order and the step that each one arrives or is aborted at are the same in
every run; floats are written as `float.hex` writes them, so that equal text means equal bits.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jaxpage
from jaxpage import LLM, BeamSearchParams, RequestOutput, SamplingParams

ARRIVALS = 4
"""Requests that arrive before each step."""
TEXTS = (
    "Anna has a",
    "Tom has a red ball. Tom goes to the park.",
    "3 + 4 = 7. 3 + 5 =",
    "Count up from 7 to 25: 7 8 9",
    "The sky is blue. The grass is",
    "Question: What colour is the snow?\nAnswer:",
    "Sam is tired 😴. Ella is",
    "The days: Friday,",
)
STORY = (
    "Mia has a red ball. Mia goes to the park. Ben is at the park too. Ben likes the ball. "
    "Mia gives the red ball to Ben. Now Ben has the red ball. Ben says thank you."
)
TURNS = (
    "Question: What is 2 + 3?\nAnswer: 2 + 3 = 5.\n",
    "Question: What comes after 8?\nAnswer: 9 comes after 8.\n",
    "Question: What colour is the sky?\nAnswer: The sky is blue.\n",
    "Question: Who has the ball?\nAnswer:",
)


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine that the requests run through."""

    options: dict[str, Any]
    model: str = "tiny"
    """"tiny", or what `LLM` takes."""
    share: float = 1.0
    """Of the requests; the first ones."""
    most_tokens: int = 24
    """Longest output of a request."""
    must_see: str = "prefix_hit_tokens"
    """A counter of the engine that has to move, or the setup shows nothing."""


WIDE: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "num_blocks": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 32, "max_model_len": 256, "seed": 0, "attention": "native",
}  # fmt: skip
SMALL = WIDE | {"block_size": 4, "num_blocks": 64}
"""A pool in which requests have to give way."""
RECOMPUTE = SMALL | {"preemption": "recompute"}
SWAP = SMALL | {"preemption": "swap", "swap_blocks": 256}
XLA, BFLOAT16 = {"attention": "xla"}, {"dtype": "bfloat16"}
SMOLLM2: dict[str, Any] = {"model": "smollm2-135m", "most_tokens": 8}
SETUPS = {
    "native": Setup(WIDE),
    "native, no prefix cache": Setup(WIDE | {"enable_prefix_caching": False}, must_see="num_steps"),
    "native, recompute": Setup(RECOMPUTE, must_see="preemptions_recompute"),
    "native, swap": Setup(SWAP, must_see="preemptions_swap"),
    "native, bfloat16": Setup(WIDE | BFLOAT16, share=0.5),
    "xla, swap": Setup(SWAP | XLA, must_see="preemptions_swap"),
    "xla, bfloat16, recompute": Setup(
        RECOMPUTE | XLA | BFLOAT16, share=0.5, must_see="preemptions_recompute"
    ),
    "reference": Setup(WIDE | {"attention": "reference"}, share=0.5),
    "smollm2, native": Setup(WIDE, **SMOLLM2, share=0.3),
    "smollm2, xla": Setup(WIDE | XLA, **SMOLLM2, share=0.2),
}
"""Every engine by name; those of the same shapes share their compiled programs."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: what is asked and when, in steps of the engine."""

    prompt: str | list[int]
    params: SamplingParams | BeamSearchParams
    options: dict[str, Any] = field(default_factory=dict)
    """`priority` and `cache_salt`."""
    abort_after: int | None = None
    """Steps after its arrival."""


def make_work(count: int, most_tokens: int) -> list[Work]:
    """That many requests: every kind in turn, each time with other prompts and seeds."""
    return [KINDS[index % len(KINDS)](index, most_tokens) for index in range(count)]


def _text(index: int) -> str:
    return TEXTS[(index % len(KINDS) + index // len(KINDS)) % len(TEXTS)]


def _ids(index: int, count: int) -> list[int]:
    draw = random.Random(index)
    return [draw.randrange(3, 480) for _ in range(count)]


def _greedy(index: int, most: int, **changes: Any) -> Work:
    params = {"temperature": 0.0, "max_tokens": most, "logprobs": 2} | changes
    return Work(_text(index), SamplingParams(**params))


def _drawn(index: int, most: int, **changes: Any) -> Work:
    params = {"temperature": 0.9, "max_tokens": most, "logprobs": 1, "seed": index} | changes
    return Work(_text(index), SamplingParams(**params))


def _beams(index: int, most: int, **settings: Any) -> Work:
    return Work(_text(index), BeamSearchParams(max_tokens=most, **settings))


def _long(index: int, most: int) -> Work:
    """A prompt that takes several steps."""
    return replace(_greedy(index, most // 2), prompt=_ids(index, 100 + index % 60))


def _shared(index: int, most: int, **options: Any) -> Work:
    return replace(_drawn(index, most), prompt=f"{STORY} {_text(index)}", options=options)


def _chat(index: int, most: int) -> Work:
    """A conversation that is a turn longer, or shorter, than the one before."""
    turns = "".join(TURNS[: 1 + index // len(KINDS) % len(TURNS)])
    return replace(_greedy(index, most), prompt=turns)


def _scored(index: int, most: int) -> Work:
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=most % 3)
    return Work(f"{_text(index)} {STORY[: index % 50]}", params)


def _aborted(index: int, most: int) -> Work:
    params = SamplingParams(temperature=0.8, max_tokens=3 * most, seed=index, ignore_eos=True)
    return Work(_text(index), params, abort_after=2 + index % 7)


KINDS: tuple[Callable[[int, int], Work], ...] = (
    lambda i, most: _greedy(i, most, logprobs=5),
    lambda i, most: _drawn(i, most, temperature=0.7 + i % 5 / 10),
    _long,
    lambda i, most: _drawn(i, most, top_k=5 + i % 40),
    lambda i, most: _beams(i, most, beam_width=2),
    lambda i, most: _drawn(i, most, top_p=0.85, logprobs=3, logprobs_mode="processed"),
    lambda i, most: _shared(i, most),
    lambda i, most: _drawn(i, most, min_p=0.05, prompt_logprobs=0),
    lambda i, most: _drawn(i, most, n=3, top_k=50, top_p=0.95, min_p=0.01),
    _chat,
    lambda i, most: _drawn(i, most, n=2, best_of=4),
    lambda i, most: _greedy(i, most, presence_penalty=0.8, frequency_penalty=0.4),
    lambda i, most: _beams(i, most, beam_width=4, length_penalty=0.0, early_stopping=True),
    lambda i, most: _drawn(
        i, most, repetition_penalty=1.3, logprobs=4, logprobs_mode="processed"
    ),
    lambda i, most: _shared(i, most, cache_salt="ab"[i // len(KINDS) % 2]),
    lambda i, most: _greedy(i, most, bad_words=["ball", " is", "the park"]),
    _aborted,
    lambda i, most: _drawn(i, most, logit_bias={20 + i % 40: 4.0, 300: -8.0, 7: 1.5}),
    lambda i, most: _drawn(i, most, allowed_token_ids=_ids(i, 60), ignore_eos=True),
    lambda i, most: _greedy(i, most, min_tokens=most // 2, stop_token_ids=_ids(i, 60)),
    _scored,
    lambda i, most: _greedy(i, most, stop=["ball", "."], include_stop_str_in_output=i % 2 == 0),
    lambda i, most: _shared(i, most, priority=i % 5 - 2),
    lambda i, most: _beams(i, most // 2, beam_width=6, length_penalty=2.0, early_stopping="never"),
    lambda i, most: _drawn(i, most, seed=None, temperature=1.5, skip_special_tokens=False),
    lambda i, most: _greedy(i, most, prompt_logprobs=2, logprobs=0, detokenize=False),
    lambda i, most: _drawn(
        i, most, presence_penalty=-0.5, logit_bias={40: 2.0}, bad_words=["red"], top_k=20,
        min_tokens=3, logprobs=5, logprobs_mode="processed",
    ),
)  # fmt: skip


def run(llm: LLM, work: list[Work]) -> dict[str, Any]:
    """The last snapshot of each request, by its place in the work."""
    engine, found, step = llm.engine, {}, 0
    aborts: dict[int, list[str]] = {}
    waiting = list(enumerate(work))
    while waiting or engine.has_unfinished:
        for index, each in waiting[:ARRIVALS]:
            engine.add_request(str(index), each.prompt, each.params, **each.options)
            if each.abort_after is not None:
                aborts.setdefault(step + each.abort_after, []).append(str(index))
        del waiting[:ARRIVALS]
        for request_id in aborts.pop(step, ()):
            engine.abort(request_id)
        for output in engine.step():
            if output.finished:
                found[output.request_id] = as_record(output)
        step += 1
    assert len(found) == len(work), f"{len(found)} of {len(work)} requests ended"
    return found


def as_record(output: RequestOutput) -> dict[str, Any]:
    """All that a request was told, in JSON's types; no times."""
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "error": output.error,
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": _entries(output.prompt_logprobs),
        "outputs": [
            {
                "index": each.index,
                "text": each.text,
                "token_ids": list(each.token_ids),
                "finish_reason": each.finish_reason,
                "stop_reason": each.stop_reason,
                "cumulative_logprob": _bits(each.cumulative_logprob),
                "score": None if each.score is None else _bits(each.score),
                "logprobs": _entries(each.logprobs),
            }
            for each in output.outputs
        ],
    }


def _entries(entries: Any) -> list[Any] | None:
    """[token id, bits, [[token id, bits], ...]] a token."""
    if entries is None:
        return None
    return [
        entry and [entry.token_id, _bits(entry.logprob), [[t, _bits(x)] for t, x in entry.top]]
        for entry in entries
    ]


def _bits(value: float) -> str:
    return float(value).hex()


def run_setup(setup: Setup, tiny: str, num_requests: int) -> dict[str, Any]:
    """What one engine answered, and its counters."""
    work = make_work(max(1, round(num_requests * setup.share)), setup.most_tokens)
    llm = LLM(tiny if setup.model == "tiny" else setup.model, **setup.options)
    try:
        return {"requests": run(llm, work), "stats": llm.stats().to_dict()}
    finally:
        llm.close()


def main() -> None:
    job = json.load(sys.stdin)
    found = run_setup(SETUPS[job["setup"]], job["tiny"], job["requests"])
    print(json.dumps({"jaxpage": jaxpage.__file__, **found}))


if __name__ == "__main__":
    main()
