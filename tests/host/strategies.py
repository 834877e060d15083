"""Random requests and engines, small enough that blocks run out."""

from __future__ import annotations

import hypothesis.strategies as st

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.host import Ladder, Request
from tests.host.driver import Driver
from tests.host.fake import VOCAB, request

MAX_MODEL_LENS = (24, 40)
EOS = (0, 1)
tokens = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn, name: str, max_prompt: int = 20) -> Request:
    max_tokens = draw(st.none() | st.integers(0, 30))
    return request(
        name,
        draw(st.lists(tokens, min_size=1, max_size=max_prompt)),
        seed=draw(st.integers(0, 3)),
        eos=EOS,
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
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 8, 64])),
        max_prefill_rows=draw(st.integers(1, 4)),
    )


@st.composite
def drivers(draw: st.DrawFn) -> Driver:
    """Pools from just enough for the longest prompt to too much for one sequence."""
    block_size = draw(st.sampled_from([1, 4, 7]))
    num_blocks = draw(st.integers(-(-24 // block_size), -(-60 // block_size)))
    return Driver(
        draw(engine_configs()),
        CacheConfig(num_blocks=num_blocks, block_size=block_size),
        depth=draw(st.integers(0, 1)),
        prefill_ladder=draw(st.none() | st.just(Ladder.doubling(4, 64))),
    )
