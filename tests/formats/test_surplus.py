"""What files hold beside a model's own parameters, or in another place, in every format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage.checkpoint import load_weights
from tests.formats.test_round_trips import assert_same, assert_same_model, hf_twin
from tests.helpers.formats import variant, write_hf, write_hf_bin, write_meta

DERIVED: dict[str, np.ndarray] = {
    "model.layers.{}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    "model.layers.{}.self_attn.rotary_emb.cos_cached": np.ones((1, 1, 64, 8), np.float32),
    "model.layers.{}.self_attn.masked_bias": np.full((), -1e4, np.float32),
    "model.layers.{}.self_attn.bias": np.ones((1, 1, 64, 64), np.float32),
    "model.rotary_emb.inv_freq": np.ones(4, np.float32),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("write", [write_hf, pytest.param(write_hf_bin, marks=pytest.mark.torch)])
def test_buffers_that_follow_from_the_config_are_dropped(
    write: Any, shards: int, tmp_path: Path
) -> None:
    model = variant("gqa")
    buffers = {name.format(i): value for name, value in DERIVED.items() for i in range(2)}
    with_buffers = replace(model, weights=model.weights | buffers)
    found = load_weights(write(with_buffers, tmp_path / "model", shards=shards))
    assert_same_model(found, hf_twin(model, tmp_path))


@pytest.mark.torch
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "name", ["layers.{}.attention.inner_attention.rope.freqs", "freqs_cis", "layers.{}.rope.freqs"]
)
def test_meta_rotary_tables_of_every_age_are_dropped(
    name: str, shards: int, tmp_path: Path
) -> None:
    import torch

    model = variant("gqa")
    folder = write_meta(model, tmp_path / "meta", shards=shards)
    for path in folder.glob("*.pth"):
        state = torch.load(path) | {name.format(i): torch.ones(4) for i in range(2)}
        torch.save(state, path)
    assert_same(load_weights(folder)[1], hf_twin(model, tmp_path)[1])


@pytest.mark.parametrize("write", [write_hf, pytest.param(write_hf_bin, marks=pytest.mark.torch)])
def test_a_tied_model_may_store_its_head_alone(write: Any, tmp_path: Path) -> None:
    model = variant("tied")
    names = {"model.embed_tokens.weight": "lm_head.weight"}
    weights = {names.get(name, name): value for name, value in model.weights.items()}
    folder = write(replace(model, weights=weights), tmp_path / "model", dtype="bfloat16")
    wanted = write(model, tmp_path / "twin", dtype="bfloat16")
    assert_same_model(load_weights(folder, "auto"), load_weights(wanted, "auto"))


@pytest.mark.torch
@pytest.mark.parametrize("shards", [1, 2])
def test_metas_tied_models_may_store_their_head_alone(shards: int, tmp_path: Path) -> None:
    import torch

    model = variant("tied")
    folder = write_meta(model, tmp_path / "meta", shards=shards, embeddings="rows")
    for path in folder.glob("*.pth"):
        state = torch.load(path)
        del state["tok_embeddings.weight"]
        torch.save(state, path)
    config, params = load_weights(folder)
    assert config.tie_word_embeddings
    assert_same(params, hf_twin(model, tmp_path)[1])


def test_an_index_is_believed(tmp_path: Path) -> None:
    """A second copy of one tensor, and one that the model doesn't have, in another shard."""
    model = variant("gqa")
    folder = write_hf(model, tmp_path / "model", shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    more = load_file(second) | {"stray": np.ones(3, np.float32)}
    save_file({name: value * 0 for name, value in load_file(first).items()} | more, second)
    assert_same_model(load_weights(folder), hf_twin(model, tmp_path))
