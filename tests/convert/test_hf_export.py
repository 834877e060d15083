"""What we write is what transformers reads, and what it writes is what we read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.run import convert
from jaxpage.formats.hf_config import read_hf_config
from tests.helpers.formats import variant, write_hf

pytestmark = pytest.mark.torch

NAMES = ("gqa", "tied", "mlp_bias", "wide_heads", "linear_rope", "dynamic_rope", "llama31_rope")


def logits(folder: Path) -> np.ndarray:
    """Logits [T, V] of 30 tokens, past every variant's original length and window."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = torch.tensor([np.random.default_rng(0).integers(0, 96, 30).tolist()])
    with torch.no_grad():
        return model(ids).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "sliding_window"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    write_hf(variant(name), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "out", to="hf")
    np.testing.assert_array_equal(logits(tmp_path / "out"), logits(tmp_path / "source"))


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=["plain", "dynamic"],
)
def test_configs_that_transformers_saves(kind: str, rope: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    settings = getattr(transformers, kind)(
        hidden_size=64,
        num_attention_heads=8,
        num_hidden_layers=2,
        intermediate_size=64,
        architectures=[kind.replace("Config", "ForCausalLM")],
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    settings.save_pretrained(tmp_path)
    found = read_hf_config(tmp_path)
    assert (found.head_dim, found.rope_theta) == (8, rope["rope_theta"])
    assert found.num_kv_heads == settings.num_key_value_heads
    assert found.sliding_window == getattr(settings, "sliding_window", None)
    assert (found.rope_scaling is None) == (rope["rope_type"] == "default")
