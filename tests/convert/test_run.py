"""Conversions as a whole: what lies in the directory, and what is refused before writing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import run
from convert.run import convert, require_disk
from jaxpage.config import DType
from jaxpage.errors import CapacityError, CheckpointError
from jaxpage.formats.converted import read_own_config
from jaxpage.formats.model import open_model
from jaxpage.tokenizer import load_tokenizer
from jaxpage.tokenizers.default_templates import LLAMA2_TEMPLATE, VICUNA_TEMPLATE, DefaultTemplate
from tests.helpers.formats import ModelFiles, variant, write_gguf, write_hf
from tests.tiny import MODEL_DIR
from tests.tokenizers.kinds import sentencepiece_model

needs_tiny = pytest.mark.skipif(not MODEL_DIR.exists(), reason="the tiny model is not built")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sides = {
        "generation_config.json": b'{"temperature": 0.6, "eos_token_id": [2, 7]}',
        "chat_template.jinja": b"{{ x }}",
    }
    return write_hf(replace(variant("gqa"), side_files=sides), tmp_path / "source")


def test_a_converted_directory_holds_everything(source: Path, tmp_path: Path) -> None:
    said = convert(source, tmp_path / "out")
    assert len(said) == 1
    assert "has no tokenizer" in said[0]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "params",
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "manifest.json",
    }
    assert read_own_config(tmp_path / "out") == open_model(source).config
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "bos_token_id": 1, "eos_token_id": [2, 7]}


def test_the_manifest_says_what_was_read(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", dtype="bfloat16")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    weights = source / "model.safetensors"
    assert manifest["source"] == str(source)
    assert manifest["source_kind"] == "huggingface"
    assert manifest["files"] == [
        {
            "name": "model.safetensors",
            "bytes": weights.stat().st_size,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
    ]
    assert manifest["dtype"] == "bfloat16"
    assert manifest["shapes"]["layers_0/attention/qkv/kernel"] == [2, 4, 8, 32]
    convert(tmp_path / "out", tmp_path / "again", dtype="float16")
    again = json.loads((tmp_path / "again" / "manifest.json").read_text())
    assert again["converted_from"] == manifest


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float16", "auto"),
        ("bfloat16", "auto"),
        ("bfloat16", "float32"),
    ],
)
def test_dtypes(stored: DType, asked: Any, to: Any, tmp_path: Path) -> None:
    """`auto` keeps the bits, every other casts once from what is stored."""
    model = variant("mqa_tied")
    convert(
        write_hf(model, tmp_path / "source", dtype=stored), tmp_path / "out", dtype=asked, to=to
    )
    wanted = stored if asked == "auto" else asked
    found = open_model(tmp_path / "out")
    assert found.config.dtype == wanted
    once = dict(open_model(tmp_path / "source").leaves(wanted))
    for path, leaf in found.leaves(wanted):
        assert leaf.tobytes() == once[path].tobytes(), path


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "wide_heads", "sliding_window"])
def test_any_source_goes_to_huggingface_at_once(name: str, tmp_path: Path) -> None:
    model = variant(name)
    convert(write_hf(model, tmp_path / "source", shards=2), tmp_path / "out", to="hf")
    written = ModelFiles.read(tmp_path / "out")
    assert written.weights.keys() == model.weights.keys()
    for tensor, value in model.weights.items():
        np.testing.assert_array_equal(written.weights[tensor], value)


@needs_tiny
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_gguf_tokenizer_survives(to: Any, tmp_path: Path) -> None:
    write_gguf(ModelFiles.read(MODEL_DIR), tmp_path / "model.gguf")
    assert convert(tmp_path / "model.gguf", tmp_path / "out", to=to) == []
    before, after = (load_tokenizer(tmp_path / name) for name in ("model.gguf", "out"))
    for text in ("Tom has a red ball.", " 12 + 3", "ünï 😴", ""):
        assert after.encode(text) == before.encode(text)
    assert after.eos_token_ids == before.eos_token_ids


def test_what_was_noticed_is_kept(tmp_path: Path) -> None:
    model = variant("tied")
    extra = model.weights | {"lm_head.weight": np.full((96, 32), np.nan, np.float32)}
    source = write_hf(replace(model, weights=extra), tmp_path / "source")
    differs, no_tokenizer = convert(source, tmp_path / "out")
    assert "lm_head.weight, which differs" in differs
    assert "no tokenizer" in no_tokenizer
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["warnings"] == [differs]


def test_nothing_is_left_of_a_failed_conversion(source: Path, tmp_path: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupted_conversion_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(leaves: Any, _: int) -> Any:
        yield next(iter(leaves))
        raise KeyboardInterrupt

    for to in ("orbax", "hf"):
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", to=to, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_source_and_destination_differ(source: Path) -> None:
    with pytest.raises(CheckpointError, match="two places"):
        convert(source, source, overwrite=True)


def test_a_source_inside_its_destination_is_not_replaced_with_it(source: Path) -> None:
    inner = write_hf(variant("gqa"), source / "inner")
    with pytest.raises(CheckpointError, match="two places"):
        convert(inner, source, overwrite=True)
    assert inner.is_dir()


def test_a_tokenizer_that_does_not_load_is_told_at_once(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.model").write_bytes(b"junk")
    [said] = convert(source, tmp_path / "out")
    assert said.startswith("the tokenizer that was copied can't be used: got ")


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    require_disk(1, tmp_path, "x")
    with pytest.raises(CapacityError, match=r"needs 1073741824\.00 GiB, and .* GiB free in"):
        require_disk(2**60, tmp_path, "x")


def test_a_full_disk_is_refused_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = run.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match="GiB free in"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"jaxpage_format": 2}, "jaxpage_format=2"),
        ({"model": None}, "without a model"),
        ({"model": {"vocab_size": 96}}, "hidden_size"),
    ],
)
def test_a_damaged_own_config_is_refused(
    change: dict[str, Any], named: str, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=named):
        open_model(tmp_path / "out")


def test_own_configs_with_unknown_keys_are_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    values["model"]["logit_scale"] = 2.0
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="logit_scale"):
        open_model(tmp_path / "out")


def test_params_of_another_config_are_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    values["model"]["num_layers"] = 3
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"no tensor layers_2/"):
        open_model(tmp_path / "out")
    values["model"] |= {"num_layers": 1}
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"got tensor layers_1/"):
        open_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "wanted"), [("vicuna-7b", VICUNA_TEMPLATE), ("a", LLAMA2_TEMPLATE)]
)
def test_a_template_that_a_name_decides_is_written_down(
    tmp_path: Path, name: str, wanted: str
) -> None:
    model = replace(variant("gqa"), side_files={"tokenizer.model": sentencepiece_model()})
    said = convert(write_hf(model, tmp_path / name), tmp_path / "out")
    assert any("has no chat template" in message for message in said)
    (tmp_path / "out").rename(tmp_path / "vicuna-of-another-name")
    again = load_tokenizer(tmp_path / "vicuna-of-another-name")
    assert again.chat_template == wanted
    assert not isinstance(again.chat_template, DefaultTemplate)
