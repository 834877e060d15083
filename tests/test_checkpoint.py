"""From a name to arrays on the device; what every format holds is in tests/formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from convert.run import convert
from jaxpage import checkpoint
from jaxpage.checkpoint import load, load_weights
from jaxpage.config import DEFAULT_MODEL, DType
from jaxpage.errors import CapacityError, CheckpointError, ConfigError
from jaxpage.models.registry import abstract_params
from tests.golden import DATA_DIR
from tests.helpers.formats import variant, write_gguf, write_hf
from tests.tiny import MODEL_DIR

GOLDEN = DATA_DIR / "golden_smollm2_greedy.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(variant("gqa"), tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tree_is_the_models(dtype: DType, folder: Path) -> None:
    config, params = load_weights(folder, dtype)
    assert config.dtype == dtype
    wanted = abstract_params(config)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for found, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert isinstance(found, jax.Array)
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
        assert found.devices() == {jax.devices()[0]}


def test_params_outlive_their_files(folder: Path) -> None:
    """The device may take memory over uncopied, but never the file's own."""
    _, params = load_weights(folder)
    before = jax.tree.map(lambda leaf: np.array(leaf), params)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_a_wrong_dtype_is_a_wrong_setting(folder: Path) -> None:
    dtype: Any = "int8"
    with pytest.raises(ConfigError, match="int8"):
        load_weights(folder, dtype)


@pytest.mark.parametrize("converted", [False, True])
def test_a_model_larger_than_memory_is_refused_unread(
    converted: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if converted:
        convert(folder, tmp_path / "out")
        folder = tmp_path / "out"
    monkeypatch.setattr(checkpoint, "free_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint, "read_leaf", None)
    monkeypatch.setattr(checkpoint, "read_leaves", None)
    with pytest.raises(CapacityError, match=r"needs 0\.00 GiB, wanted at most the 0\.00 GiB"):
        load_weights(folder)


def test_warnings_of_a_conversion_are_given_again(tmp_path: Path) -> None:
    model = variant("gqa")
    weights = {name: value.copy() for name, value in model.weights.items()}
    weights["model.norm.weight"][0] = np.nan
    folder = write_hf(replace(model, weights=weights), tmp_path / "model")
    with pytest.warns(UserWarning, match=r"model\.norm\.weight holds 1 NaN"):
        load_weights(folder)
    convert(folder, tmp_path / "out")
    with pytest.warns(UserWarning, match=r"model\.norm\.weight holds 1 NaN"):
        load_weights(tmp_path / "out")


@pytest.mark.parametrize("noted", [1.5, {"a": "b"}, "text", [1], None])
def test_a_manifest_of_other_types_is_one_line(noted: object, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({"warnings": noted}))
    with pytest.raises(CheckpointError, match=r"warnings=.*manifest\.json"):
        load_weights(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"\x00\x01\x02 random"),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("config.json", b"\xff\xfe"),
        ("generation_config.json", b"{half"),
        ("model.safetensors", b"\x93random bytes"),
        ("model.safetensors", None),
        ("model.safetensors.index.json", b"{"),
    ],
)
def test_damaged_directories_are_one_line(name: str, content: bytes | None, folder: Path) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        load_weights(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_places_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"random")
    for path in ("empty", "model.bin", "lost.gguf"):
        with pytest.raises(CheckpointError, match=path):
            load_weights(tmp_path / path)


def test_kinds_are_told_by_content(tmp_path: Path) -> None:
    """A GGUF file by another name is one; a text file called .gguf is none."""
    write_gguf(variant("gqa"), tmp_path / "model.bin")
    assert load_weights(tmp_path / "model.bin")[0].num_layers == 2
    (tmp_path / "model.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match="not GGUF"):
        load_weights(tmp_path / "model.gguf")


@pytest.mark.skipif(not MODEL_DIR.exists(), reason="the tiny model is not built")
def test_load_gives_all_three() -> None:
    config, params, tokenizer = load(MODEL_DIR)
    assert params["embed"]["embedding"].shape[0] == config.vocab_size
    assert tokenizer.decode(tokenizer.encode("Tom has a red ball.")) == "Tom has a red ball."


@pytest.mark.slow
@pytest.mark.weights
def test_the_default_model() -> None:
    config, params, tokenizer = load(DEFAULT_MODEL)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_word_embeddings
    assert params["layers_29"]["attention"]["qkv"]["kernel"].shape == (3, 5, 64, 576)
    for case in json.loads(GOLDEN.read_text())["items"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
