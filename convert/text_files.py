"""The files beside the weights: tokenizer, chat template, generation settings.

A Hugging Face directory's are copied as they are; a tokenizer that lives in a GGUF file or beside
Meta's shards is written in Hugging Face's form.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from jaxpage.chat_template import DefaultTemplate
from jaxpage.errors import CheckpointError
from jaxpage.formats.hf_config import write_generation_config
from jaxpage.formats.model import StoredModel
from jaxpage.formats.sources import find_tokenizer
from jaxpage.reading import MOST_SETTINGS_BYTES, read_json
from jaxpage.tokenizer import load_tokenizer, save_tokenizer, tokenizer_from_gguf
from jaxpage.tokenizers.hf_directory import FAST_FILE, MODEL_FILE
from jaxpage.tokenizers.hf_settings import (
    ADDED_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    MAP_FILE,
    TEMPLATE_FILE,
)

_NAMES = (
    FAST_FILE,
    MODEL_FILE,
    CONFIG_FILE,
    MAP_FILE,
    ADDED_FILE,
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    "chat_template.json",
    GENERATION_FILE,
)


def write_text_files(model: StoredModel, destination: Path) -> list[str]:
    """Copy or write what a tokenizer is built from; returns warnings, as when there is none."""
    place = find_tokenizer(model.path)
    # A tokenizer.json beside Meta's shards was put there on purpose, and is copied as it is.
    is_written = model.kind == "meta" and place and not (place / FAST_FILE).exists()
    if place and model.gguf_metadata is not None:
        save_tokenizer(tokenizer_from_gguf(model.gguf_metadata), destination)
    elif place and is_written:
        save_tokenizer(load_tokenizer(place), destination)
    else:
        _copy_files(place or model.path, destination)
    path = destination / GENERATION_FILE
    kept = read_json(path, most=MOST_SETTINGS_BYTES) if path.exists() else {}
    merged = json.dumps(kept | write_generation_config(model.config), indent=2)
    path.write_text(merged + "\n", encoding="utf-8")
    if place:
        return _fault_of_tokenizer(destination) or _write_default_template(place, destination)
    return [f"{model.path} has no tokenizer; only token ids can be used"]


def _copy_files(directory: Path, destination: Path) -> None:
    for name in _NAMES if directory.is_dir() else ():
        if (directory / name).is_file():
            _check_inside(directory, name)
            shutil.copyfile(directory / name, destination / name)


def _check_inside(directory: Path, name: str) -> None:
    """CheckpointError for a link out of the model: it could publish any file of this machine.

    A snapshot in the Hub's cache is made of links into the `blobs` beside it, which are its own.
    """
    root = directory.resolve()
    places = [root]
    if root.parent.name == "snapshots":
        places.append(root.parent.parent / "blobs")
    target = (directory / name).resolve()
    if not any(target.is_relative_to(place) for place in places):
        raise CheckpointError(
            f"got {directory / name}, a link to {target} outside of the model, wanted a file of "
            "the model's own; copy it there if it belongs to the model"
        )


def _fault_of_tokenizer(directory: Path) -> list[str]:
    """Warnings for a tokenizer that does not load: now rather than at the first use."""
    try:
        load_tokenizer(directory)
    except CheckpointError as error:
        return [f"the tokenizer that was copied can't be used: {error}"]
    return []


def _write_default_template(source: Path, destination: Path) -> list[str]:
    """Writes the default template that the source's name or tokens decide, so that the destination,
    which has another name, keeps it; returns warnings."""
    template = load_tokenizer(source).chat_template
    if not isinstance(template, DefaultTemplate):
        return []
    (destination / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return [f"{source} has no chat template; {template.origin}, the default, was written"]
