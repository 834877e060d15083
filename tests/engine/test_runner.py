"""The device's owner after its end."""

from __future__ import annotations

import pytest

from jaxpage import LLM, ConfigError, SamplingParams
from tests.tiny import MODEL_DIR


def test_a_closed_engine_says_so() -> None:
    llm = LLM(MODEL_DIR, num_blocks=4, max_model_len=64, max_num_seqs=1)
    llm.close()
    llm.close()
    llm.engine.add_request("a", "Tom", SamplingParams())
    for call in (llm.engine.step, lambda: llm.generate("Tom")):
        with pytest.raises(ConfigError, match=r"got a call after close\(\)"):
            call()
