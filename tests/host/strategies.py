"""Random requests and engines, small enough that blocks run out."""

from __future__ import annotations

import hypothesis.strategies as st

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import Ladder, Request
from jaxpage.host.policy import PreemptionCosts
from tests.host.driver import Driver
from tests.host.fake import VOCAB, beam_request, request

MAX_MODEL_LENS = (24, 40)
EOS = (0, 1)
SYSTEM = tuple((7 * i + 3) % VOCAB for i in range(16))
tokens = st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw: st.DrawFn, max_prompt: int = 20) -> list[int]:
    """Some begin alike, so that they can share."""
    head = SYSTEM[: draw(st.sampled_from([0, 0, 9, 16]))]
    tail = draw(st.lists(tokens, min_size=1, max_size=max_prompt - len(head)))
    return [*head, *tail]


@st.composite
def requests(draw: st.DrawFn, name: str, max_prompt: int = 20) -> Request:
    prompt, priority = draw(prompts(max_prompt)), draw(st.sampled_from([0, 0, 0, 1, -1]))
    if draw(st.integers(0, 3)) == 0:
        return beam_request(
            name,
            prompt,
            draw(st.integers(1, 4)),
            max_tokens=draw(st.integers(1, 16)),
            eos=EOS,
            priority=priority,
            length_penalty=draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
            ignore_eos=draw(st.booleans()),
        )
    max_tokens = draw(st.none() | st.integers(0, 30))
    return request(
        name,
        prompt,
        seed=draw(st.integers(0, 3)),
        eos=EOS,
        priority=priority,
        salt=draw(st.sampled_from([None, None, "x"])),
        best_of=draw(st.sampled_from([1, 1, 2, 4])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, 30 if max_tokens is None else max_tokens))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.just(()) | st.just((2, 3))),
        logprobs=draw(st.none() | st.just(1)),
        prompt_logprobs=draw(st.none() | st.just(0)),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
    )


@st.composite
def engine_configs(draw: st.DrawFn) -> EngineConfig:
    return EngineConfig(
        max_model_len=draw(st.sampled_from(MAX_MODEL_LENS)),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 8, 64])),
        max_prefill_rows=draw(st.integers(1, 4)),
        preemption=draw(st.sampled_from(["auto", "swap", "recompute"])),
        enable_prefix_caching=draw(st.booleans()),
    )


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    """Pools from just enough for the longest prompt to too much for one sequence."""
    block_size = draw(st.sampled_from([1, 4, 7]))
    num_blocks = draw(st.integers(-(-24 // block_size), -(-60 // block_size)))
    return Driver(
        draw(engine_configs()),
        CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            num_swap_blocks=draw(st.sampled_from([0, 3, 60])),
        ),
        depth=draw(st.integers(0, 1)),
        prefill_ladder=draw(st.none() | st.just(Ladder.doubling(4, 64))),
        costs=PreemptionCosts(seconds_per_token=draw(st.sampled_from([1e-6, 1.0]))),
    )
