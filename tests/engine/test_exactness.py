"""Whatever is shared, evicted, swapped or recomputed, the same tokens come out.

One device pool and one set of programs; what varies is the host's part: how many of the blocks it
may use, who gives way how, what is cached, how prompts are cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxpage import LLM, BeamSearchParams, RequestError, SamplingParams, load
from jaxpage.config import CacheConfig
from jaxpage.engine.engine import LLMEngine
from jaxpage.host.scheduler import Scheduler
from jaxpage.outputs import EngineStats
from tests.golden import DATA_DIR
from tests.tiny import MODEL_DIR

GOLDEN = json.loads((DATA_DIR / "golden_tiny.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, n=3, seed=7)
BEAM = BeamSearchParams(beam_width=4, max_tokens=12)
START = "Anna and Ben went to the beach. "
WORK: list[tuple[str, SamplingParams | BeamSearchParams]] = [
    (START + "Anna has a", GREEDY),
    (START + "Ben has", SAMPLED),
    ("Tom has a red", BEAM),
    (START + "Anna has a", replace(SAMPLED, seed=8, n=2)),
    ("One two three", GREEDY),
    ("The", replace(BEAM, length_penalty=-1.0, beam_width=2)),
]
LIMITS: dict[str, Any] = {
    "block_size": 4, "num_blocks": 128, "max_model_len": 128, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "seed": 0, "swap_blocks": 64,
}  # fmt: skip
Ids = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    config, params, tokenizer = load(str(MODEL_DIR), dtype="float32")
    return {"config": config, "params": params, "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def llm(parts: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(**parts, **LIMITS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Ids:
    """Each request alone, nothing shared, enough of everything."""
    return [run(llm, [work], num_blocks=128, enable_prefix_caching=False)[0][0] for work in WORK]


def run(
    llm: LLM,
    work: list[tuple[str, SamplingParams | BeamSearchParams]],
    *,
    num_blocks: int,
    swap_blocks: int = 0,
    order: int = 1,
    **engine: Any,
) -> tuple[Ids, EngineStats]:
    """The ids of all outputs, with a scheduler of its own over the same device."""
    cache = CacheConfig(num_blocks, llm.cache_config.block_size, swap_blocks)
    config = replace(llm.engine_config, **engine)
    ladder = llm.runner.shapes.prefill_tokens
    scheduler = Scheduler(config, cache, prefill_ladder=ladder)
    own = LLMEngine(llm.runner, scheduler, llm._engine.requests)
    for index in list(range(len(work)))[::order]:
        own.add_request(str(index), *work[index])
    done: dict[str, list[tuple[int, ...]]] = {}
    while own.has_unfinished:
        for output in own.step():
            assert output.error is None, output
            if output.finished:
                done[output.request_id] = [each.token_ids for each in output.outputs]
        scheduler.check_integrity()
    stats = own.stats()
    assert stats.blocks_free == stats.blocks_total
    return [done[str(index)] for index in range(len(work))], stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "pressed"),
    [
        ({"num_blocks": 128}, ""),
        ({"num_blocks": 128, "order": -1, "max_num_batched_tokens": 8}, ""),
        ({"num_blocks": 128, "enable_prefix_caching": False, "order": -1}, ""),
        ({"num_blocks": 19, "preemption": "recompute"}, "recompute"),
        ({"num_blocks": 19, "preemption": "swap", "swap_blocks": 64}, "swap"),
        ({"num_blocks": 26, "preemption": "swap", "swap_blocks": 64, "order": -1,
          "enable_prefix_caching": False, "max_num_batched_tokens": 8}, "swap"),
        ({"num_blocks": 26, "preemption": "recompute", "order": -1, "max_num_batched_tokens": 8,
          "enable_prefix_caching": False}, "recompute"),
        ({"num_blocks": 19, "preemption": "swap", "swap_blocks": 1}, "recompute"),
    ],
    ids=str,
)  # fmt: skip
def test_ids_are_those_of_each_request_alone(
    llm: LLM, expected: Ids, settings: dict[str, Any], pressed: str
) -> None:
    got, stats = run(llm, WORK, **settings)
    assert got == expected
    if pressed == "swap":
        assert stats.preemptions_swap > 0 and stats.swapped_out_blocks > 0
    elif pressed:
        assert stats.preemptions_recompute > 0


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [7, 32])
def test_the_block_size_changes_nothing(
    parts: dict[str, Any], expected: Ids, block_size: int
) -> None:
    other = LLM(**parts, **{**LIMITS, "block_size": block_size})
    tight = 128 // block_size + 6
    got, _ = run(other, WORK, num_blocks=tight, swap_blocks=64)
    assert got == expected
    other.close()


@pytest.mark.slow
def test_shared_beginnings_save_blocks_and_prefill(llm: LLM) -> None:
    _, alone = run(llm, WORK, num_blocks=128, enable_prefix_caching=False)
    _, shared = run(llm, WORK, num_blocks=128)
    assert shared.prefix_hit_tokens > 0 and shared.blocks_saved_by_sharing > 0
    assert alone.prefix_hit_tokens == 0 and alone.blocks_saved_by_sharing > 0  # by samples


@pytest.mark.slow
def test_a_hit_is_told_and_forgotten_on_request(llm: LLM) -> None:
    prompt = "Tom and Lily and Anna and Ben and Tom and Lily"
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens >= 8 > first.num_cached_tokens == 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    llm.update_params(llm.runner.params)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_a_score_is_the_sum_of_what_each_token_got(llm: LLM) -> None:
    output = llm.generate("Tom has a", replace(GREEDY, logprobs=0))[0].outputs[0]
    score = llm.score("Tom has a", output.token_ids)
    assert tuple(entry.token_id for entry in score.tokens) == output.token_ids
    assert score.logprob == pytest.approx(output.cumulative_logprob, abs=1e-4)
    with pytest.raises(RequestError, match="empty completion"):
        llm.score("Tom has a", "")


@pytest.mark.parametrize("case", GOLDEN["beams"][::3], ids=lambda case: case["name"])
def test_beams_are_those_of_transformers(llm: LLM, case: dict[str, Any]) -> None:
    params = BeamSearchParams(
        beam_width=case["beam_width"],
        max_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )
    outputs = llm.generate([case["prompt_token_ids"]], params, raise_on_error=True)[0].outputs
    assert [list(each.token_ids) for each in outputs] == case["sequences"]
    assert [each.score for each in outputs] == pytest.approx(case["scores"], abs=1e-3)
