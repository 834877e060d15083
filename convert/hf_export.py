"""Write any model as a Hugging Face directory: its family's rules read backwards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from jaxpage.config import DType, ModelConfig
from jaxpage.formats.assemble import expand
from jaxpage.formats.hf_config import hf_layout, write_hf_config
from jaxpage.formats.model import StoredModel
from jaxpage.formats.rules import extract, source_shape
from jaxpage.formats.safetensors_io import SINGLE_NAME, write_safetensors
from jaxpage.models.family import Rule

Leaf = tuple[str, NDArray[Any]]


def export_hf(model: StoredModel, leaves: Iterable[Leaf], directory: Path, dtype: DType) -> None:
    """Write weights and config into `directory`, leaf by leaf."""
    config = replace(model.config, dtype=dtype)
    rules = _rules_by_leaf(config)
    shapes = {
        name: source_shape(rule, model.shapes[path])
        for path in model.shapes
        for rule, name in rules[path]
    }

    def tensors() -> Iterator[NDArray[Any]]:
        for path, leaf in leaves:
            for rule, _ in rules[path]:
                yield extract(rule, leaf)

    write_safetensors(directory / SINGLE_NAME, shapes, tensors(), dtype)
    text = json.dumps(write_hf_config(config), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _rules_by_leaf(config: ModelConfig) -> dict[str, list[tuple[Rule, str]]]:
    """Leaf path -> the stored tensors that it is made of, in the order of the table."""
    found: dict[str, list[tuple[Rule, str]]] = {}
    for rule, name, path in expand(hf_layout(config).rules, config):
        if path is not None:
            found.setdefault(path, []).append((rule, name))
    return found
