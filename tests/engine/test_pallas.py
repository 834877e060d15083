"""The whole engine through the GPU kernels, interpreted: the ids are those of plain XLA."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

import jaxpage as jp
from tests.golden import DATA_DIR
from tests.tiny import MODEL_DIR

PROMPTS = ("Tom has a red", "Anna", "The dog and the cat went to the big park to play with a ball")


@pytest.fixture(scope="module")
def parts() -> tuple[jp.ModelConfig, dict[str, Any], Any]:
    return jp.load(str(MODEL_DIR), dtype="float32")


def generated(parts: tuple[Any, ...], attention: Any) -> list[tuple[int, ...]]:
    config, params, tokenizer = parts
    llm = jp.LLM(
        config=config,
        params=params,
        tokenizer=tokenizer,
        attention=attention,
        block_size=8,
        num_blocks=32,
        max_num_seqs=2,
        max_num_batched_tokens=16,
    )
    greedy = jp.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    outs = llm.generate(list(PROMPTS), greedy)
    llm.close()
    return [tuple(out.outputs[0].token_ids) for out in outs]


@pytest.mark.slow
def test_the_ids_are_those_of_xla(parts: tuple[Any, ...]) -> None:
    """Chunked prefill beside decode, and a request that waits for its turn."""
    got = generated(parts, "pallas")
    assert all(len(ids) == 5 for ids in got)
    assert got == generated(parts, "xla")


def test_every_layer_runs_the_kernels(parts: tuple[Any, ...]) -> None:
    config, params, _ = parts
    model, cache = jp.build_model(config), jp.init_cache(config, num_blocks=2, block_size=16)
    for step in (
        jp.prefill_input([[1, 2, 3]], block_tables=[[1]], block_size=16),
        jp.decode_input([4], [3], block_tables=[[1]], block_size=16),
    ):
        for attention, count in (("pallas", True), ("xla", False)):
            program = jax.make_jaxpr(
                lambda params, cache, step, name=attention: jp.forward(
                    model, params, cache, step, attention=name
                )
            )(params, cache, step)
            assert ("pallas_call" in str(program)) == count


@pytest.mark.slow
@pytest.mark.weights
def test_a_real_models_ids_are_the_recorded_ones() -> None:
    """All golden prompts of SmolLM2 with all of their tokens, in one batch.

    What takes time in interpret mode is compiling, so the prompts fit into one step: one prefill
    program and one decode program in all.
    """
    path = DATA_DIR / "golden_smollm2_greedy.json"
    items = json.loads(path.read_text(encoding="utf-8"))["items"]
    llm = jp.LLM(
        "smollm2-135m",
        dtype="float32",
        attention="pallas",
        num_blocks=128,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
    )
    greedy = jp.SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outs = llm.generate([item["prompt"] for item in items], greedy, raise_on_error=True)
    llm.close()
    for item, out in zip(items, outs, strict=True):
        assert list(out.outputs[0].token_ids) == item["greedy_ids"], item["name"]
