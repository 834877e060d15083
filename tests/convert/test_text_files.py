"""What lies beside the weights: found, copied or written, and never from outside the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from convert.run import convert
from jaxpage.checkpoint import load
from jaxpage.errors import CheckpointError
from jaxpage.formats.sources import find_tokenizer
from jaxpage.tokenizer import load_tokenizer
from tests.helpers.formats import ModelFiles, variant, write_gguf, write_hf, write_meta
from tests.helpers.formats.gguf_file import write_gguf as write_gguf_file
from tests.tiny import MODEL_DIR

needs_tiny = pytest.mark.skipif(not MODEL_DIR.exists(), reason="the tiny model is not built")


@pytest.mark.parametrize("kind", ["huggingface", "converted", "gguf", "meta"])
def test_a_model_without_a_tokenizer_is_read(kind: str, tmp_path: Path) -> None:
    model = variant("gqa")
    path = tmp_path / "model"
    if kind == "gguf":
        write_gguf_file(model, path)
    elif kind == "meta":
        pytest.importorskip("torch")
        write_meta(model, path)
    else:
        write_hf(model, path)
    if kind == "converted":
        [said] = convert(path, tmp_path / "out")
        assert "has no tokenizer; only token ids can be used" in said
        path = tmp_path / "out"
    assert find_tokenizer(path) is None
    assert load(path)[2] is None


@needs_tiny
@pytest.mark.torch
@pytest.mark.parametrize("place", [".", ".."])
@pytest.mark.parametrize("kind", ["json", "model", "both"])
def test_metas_tokenizer_lies_beside_the_shards_or_above(
    kind: str, place: str, tmp_path: Path
) -> None:
    """A tokenizer.json there is copied as it is, and wins over tokenizer.model, as everywhere."""
    folder = write_meta(variant("gqa"), tmp_path / "7B")
    letters = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    wanted = [1, 0] if kind != "model" else load_tokenizer(MODEL_DIR).encode("ba")
    if kind != "json":
        shutil.copy(MODEL_DIR / "tokenizer.model", folder / place)
    if kind != "model":
        letters.save(str(folder / place / "tokenizer.json"), pretty=True)
    told = convert(folder, tmp_path / "out")
    assert [line.partition("; ")[2] for line in told] == (
        ["LLaMA-2's, the default, was written"] if kind == "model" else []
    )
    for path in (folder, tmp_path / "out"):
        found = load(path)[2]
        assert found is not None
        assert found.encode("ba") == wanted
    if kind != "model":
        copied = (tmp_path / "out" / "tokenizer.json").read_text()
        assert copied == (folder / place / "tokenizer.json").read_text()


@pytest.mark.parametrize("name", ["no_vocab", "none"])
def test_a_gguf_file_may_say_that_it_has_no_vocabulary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.helpers.formats.gguf_file._add_tokenizer",
        lambda writer, _: writer.add_tokenizer_model(name),
    )
    model = ModelFiles(variant("gqa").config, variant("gqa").weights, {"tokenizer.model": b"x"})
    write_gguf(model, tmp_path / "model.gguf")
    assert load(tmp_path / "model.gguf")[2] is None


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"]
)
@pytest.mark.parametrize("target", ["../secret", "/{}/secret", "inner/../../secret", "hop"])
def test_links_out_of_the_model_are_refused(name: str, target: str, tmp_path: Path) -> None:
    """Whoever made the directory would choose what the owner of the converted one publishes."""
    source = write_hf(variant("gqa"), tmp_path / "source")
    (source / "inner").mkdir()
    (source / "hop").symlink_to("../secret")
    (tmp_path / "secret").write_text('{"password": 1}')
    (source / name).symlink_to(target.format(str(tmp_path).lstrip("/")))
    with pytest.raises(CheckpointError, match=rf"{name}, a link to .*secret"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_the_model_and_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / "abc"
    write_hf(variant("gqa"), snapshot)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(blobs / name[:3])
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    (blobs / "template").write_text("{{ x }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/template")
    (snapshot / "own.json").write_text("{}")
    (snapshot / "special_tokens_map.json").symlink_to("own.json")
    (tmp_path / "link").symlink_to(snapshot)
    convert(tmp_path / "link", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ x }}"
    copied = tmp_path / "out" / "special_tokens_map.json"
    assert copied.read_text() == "{}"
    assert not copied.is_symlink()
