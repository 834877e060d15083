"""Stored tensors against the config: what is missing, surplus, mis-shaped or not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxpage.errors import CheckpointError
from jaxpage.formats.model import StoredModel, open_model
from tests.helpers.formats import ModelFiles, variant, write_hf

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def opened(
    folder: Path,
    changes: dict[str, np.ndarray] | None = None,
    *,
    name: str = "gqa",
    drop: str = "",
) -> StoredModel:
    """A variant in a folder, with tensors replaced or added, and one dropped."""
    model = variant(name)
    weights = {key: value for key, value in model.weights.items() if key != drop}
    return open_model(write_hf(ModelFiles(model.config, weights | (changes or {}), {}), folder))


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, "[96, 32]"),
        ("model.layers.1.self_attn.k_proj.weight", "[16, 32]"),
        ("model.layers.0.mlp.down_proj.weight", "[32, 64]"),
        ("model.norm.weight", "[32]"),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(name: str, shape: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, drop=name)
    assert f"got no tensor {name}" in str(error.value)
    assert f"wanted one of shape {shape}" in str(error.value)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*the head is not tied"):
        opened(tmp_path, drop=HEAD)


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"got tensor model\.layers\.2\.mlp\.x of shape \[3\]"
    ):
        opened(tmp_path, {"model.layers.2.mlp.x": np.ones(3, np.float32)})


def test_biases_that_the_config_does_not_have_are_surplus(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"q_proj\.bias of shape \[32\]"):
        opened(tmp_path, bias)


def test_a_training_state_names_the_missing_tensor(tmp_path: Path) -> None:
    """Optimiser state beside no model: every name is foreign."""
    model = variant("gqa")
    weights = {f"state.{name}.exp_avg": value for name, value in model.weights.items()}
    write_hf(ModelFiles(model.config, weights, {}), tmp_path)
    with pytest.raises(CheckpointError, match=rf"got no tensor {EMBEDDING}"):
        open_model(tmp_path)


@pytest.mark.parametrize("shape", [(95, 32), (32, 96), (96, 32, 1), (3072,)])
def test_a_mis_shaped_tensor_says_found_and_wanted(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, {EMBEDDING: np.ones(shape, np.float32)})
    assert f"{EMBEDDING} of shape {list(shape)}" in str(error.value)
    assert "wanted [96, 32]" in str(error.value)


def test_old_rotary_buffers_are_dropped(tmp_path: Path) -> None:
    buffer = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert opened(tmp_path / "a", buffer).shapes == opened(tmp_path / "b").shapes


def test_a_tied_model_may_repeat_its_embedding(tmp_path: Path) -> None:
    same = variant("tied").weights[EMBEDDING]
    model = opened(tmp_path, {HEAD: same}, name="tied")
    assert "lm_head/kernel" not in model.shapes


@pytest.mark.parametrize("shape", [(96, 32), (95, 32)])
def test_a_tied_model_with_another_head_is_warned_of(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"lm_head\.weight, which differs"):
        opened(tmp_path, {HEAD: np.ones(shape, np.float32)}, name="tied")


@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "1 NaN and 0 infinite"), (-np.inf, "0 NaN and 1 infinite")]
)
def test_values_that_are_not_finite_are_warned_of(value: float, said: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    broken = variant("gqa").weights[name].copy()
    broken[3, 4] = value
    model = opened(tmp_path, {name: broken})
    with pytest.warns(UserWarning, match=rf"up_proj\.weight holds {said} values"):
        leaves = dict(model.leaves("float32"))
    assert not np.isfinite(leaves["layers_1/mlp/gate_up/kernel"]).all()


def test_large_values_whose_sum_overflows_are_fine(tmp_path: Path) -> None:
    huge = np.full((96, 32), 1e38, np.float32)
    dict(opened(tmp_path, {EMBEDDING: huge}).leaves("float32"))


def test_overflow_in_a_smaller_dtype_is_warned_of(tmp_path: Path) -> None:
    model = opened(tmp_path, {EMBEDDING: np.full((96, 32), 1e6, np.float32)})
    dict(model.leaves("bfloat16"))
    with pytest.warns(UserWarning, match=rf"{EMBEDDING} holds 0 NaN and 3072 infinite"):
        dict(model.leaves("float16"))


def test_a_padded_vocabulary_keeps_its_rows(tmp_path: Path) -> None:
    """32001 and 32064 are what fine-tunes have: whatever the config says is what is read."""
    model = variant("odd_vocab")
    stored = open_model(write_hf(model, tmp_path / "odd"))
    assert stored.shapes["embed/embedding"] == (97, 32)
    padded = replace(model, config=model.config | {"vocab_size": 128})
    with pytest.raises(CheckpointError, match=r"of shape \[97, 32\].*wanted \[128, 32\]"):
        open_model(write_hf(padded, tmp_path / "padded"))
