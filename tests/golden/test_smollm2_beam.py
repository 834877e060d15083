"""Beams of the real model against Hugging Face's recorded ones: ids equal, scores close.

A few of them; all, and more computed live, are `benchmarks.checks.beam_parity`'s.
"""

from __future__ import annotations

import json

import pytest

from jaxpage import LLM, BeamSearchParams
from tests.golden import DATA_DIR

GOLDEN = DATA_DIR / "golden_smollm2_beam.json"
SETTINGS = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
CHOSEN = (0, 4, 8, 20, 21, 22, 26, 28)
"""Each of the five settings; from 20 on, beams that end before the limit."""

pytestmark = [pytest.mark.weights, pytest.mark.slow]


def test_beams_in_one_batch_are_those_of_transformers() -> None:
    recorded = json.loads(GOLDEN.read_text())["items"]
    items = [recorded[index] for index in CHOSEN]
    params = [BeamSearchParams(**{name: item[name] for name in SETTINGS}) for item in items]
    assert (
        len({(each.beam_width, each.length_penalty, each.early_stopping) for each in params}) == 5
    )
    llm = LLM("smollm2-135m", dtype="float32", num_blocks=256, max_model_len=128, max_num_seqs=32)
    outputs = llm.generate([item["prompt"] for item in items], params, raise_on_error=True)
    llm.close()
    for item, output in zip(items, outputs, strict=True):
        assert list(output.prompt_token_ids) == item["prompt_ids"]
        assert [list(each.token_ids) for each in output.outputs] == item["sequences"]
        for each, score in zip(output.outputs, item["scores"], strict=True):
            penalty = len(each.token_ids) ** item["length_penalty"]
            assert each.score is not None  # a negative penalty multiplies the sum's own error
            assert each.score * penalty == pytest.approx(each.cumulative_logprob, rel=1e-5)
            assert each.cumulative_logprob == pytest.approx(score * penalty, abs=1e-3)
