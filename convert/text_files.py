"""The files beside the weights: tokenizer, chat template, generation settings.

A Hugging Face directory's are copied as they are; a tokenizer that lives in a GGUF file or beside
Meta's shards is written in Hugging Face's form.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from convert.fields import read_json
from convert.hf_config import write_generation_config
from convert.model import StoredModel
from jaxpage.chat_template import DefaultTemplate
from jaxpage.errors import CheckpointError
from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, tokenizer_from_gguf

_GENERATION_NAME = "generation_config.json"
_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    _GENERATION_NAME,
)


def write_text_files(model: StoredModel, destination: Path) -> list[str]:
    """Copy or write what a tokenizer is built from; returns what to warn of: that there is none."""
    tokenizer = _foreign_tokenizer(model)
    if tokenizer is not None:
        save_tokenizer(tokenizer, destination)
    for name in _NAMES if model.kind in ("huggingface", "converted") else ():
        if (model.path / name).is_file():
            shutil.copyfile(model.path / name, destination / name)
    path = destination / _GENERATION_NAME
    kept = read_json(path) if path.exists() else {}
    merged = json.dumps(kept | write_generation_config(model.config), indent=2)
    path.write_text(merged + "\n", encoding="utf-8")
    if any((destination / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return _fault_of_tokenizer(destination) or _write_default_template(model, destination)
    return [f"{model.path} has no tokenizer; only token ids can be used"]


def _fault_of_tokenizer(directory: Path) -> list[str]:
    """What to warn of, told now rather than at the first load."""
    try:
        load_tokenizer(directory)
    except CheckpointError as error:
        return [f"the tokenizer that was copied can't be used: {error}"]
    return []


def _write_default_template(model: StoredModel, destination: Path) -> list[str]:
    """Writes down the template that the source's name decides: the destination has another."""
    if model.kind not in ("huggingface", "converted"):
        return []
    template = load_tokenizer(model.path).chat_template
    if not isinstance(template, DefaultTemplate):
        return []
    (destination / "chat_template.jinja").write_text(template, encoding="utf-8")
    return [f"{model.path} has no chat template; {template.whose} was written, by its name"]


def _foreign_tokenizer(model: StoredModel) -> Tokenizer | None:
    """The tokenizer of a GGUF file or a Meta directory."""
    if model.gguf_metadata is not None:
        has_one = "tokenizer.ggml.model" in model.gguf_metadata
        return tokenizer_from_gguf(model.gguf_metadata) if has_one else None
    if model.kind == "meta":
        # Meta's first download put tokenizer.model beside the model directories.
        for directory in (model.path, model.path.resolve().parent):
            if (directory / "tokenizer.model").is_file():
                return load_tokenizer(directory / "tokenizer.model")
    return None
