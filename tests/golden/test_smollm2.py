"""The real model against Hugging Face's recorded outputs: ids equal, log-probabilities close."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxpage import LLM, RequestOutput, SamplingParams
from tests.golden import DATA_DIR

GOLDEN = DATA_DIR / "golden_smollm2_greedy.json"
LOGPROB_TOLERANCE = 1e-3

pytestmark = [pytest.mark.weights, pytest.mark.slow]


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["items"]


@pytest.fixture(scope="module")
def outputs(items: list[dict[str, Any]]) -> list[RequestOutput]:
    """All prompts in one call, so that the rows of a batch could disturb each other."""
    llm = LLM("smollm2-135m", dtype="float32", num_blocks=128, max_model_len=1024, max_num_seqs=8)
    params = SamplingParams(
        temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=5, skip_special_tokens=False
    )
    found = llm.generate([item["prompt"] for item in items], params, raise_on_error=True)
    llm.close()
    return found


def test_prompts_tokenise_as_recorded(
    items: list[dict[str, Any]], outputs: list[RequestOutput]
) -> None:
    for item, output in zip(items, outputs, strict=True):
        assert list(output.prompt_token_ids) == item["prompt_ids"], item["name"]


def test_greedy_ids_and_text_are_equal(
    items: list[dict[str, Any]], outputs: list[RequestOutput]
) -> None:
    for item, output in zip(items, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == item["greedy_ids"], item["name"]
        assert output.outputs[0].text == item["greedy_text"], item["name"]


def test_log_probabilities_of_the_best_five_are_close(
    items: list[dict[str, Any]], outputs: list[RequestOutput]
) -> None:
    worst = 0.0
    for item, output in zip(items, outputs, strict=True):
        for ids, logprobs, entry in zip(
            item["top5_ids"], item["top5_logprobs"], output.outputs[0].logprobs or (), strict=True
        ):
            ours = dict(entry.top)
            for token_id, logprob in zip(ids, logprobs, strict=True):
                # the fifth place may go to another id whose log-probability is the same
                worst = max(worst, abs(ours.get(token_id, min(ours.values())) - logprob))
    print(f"largest log-probability difference: {worst:.2e}")
    assert worst < LOGPROB_TOLERANCE
