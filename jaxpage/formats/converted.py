"""A directory that `convert` wrote: what its files are called and say.

    config.json      a ModelConfig, marked and versioned
    manifest.json    where the model came from, and what was noticed on the way
    params/          the parameter tree, an Orbax checkpoint

Tokenizer files lie beside them under the names that Hugging Face gives them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import jax

from jaxpage.config import MOST_LAYERS, ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.fields import Fields, short
from jaxpage.formats.assemble import NUMPY_DTYPES, check_leaves, leaf_shapes
from jaxpage.formats.orbax_io import stored_leaves
from jaxpage.models.registry import family_named
from jaxpage.reading import MOST_SETTINGS_BYTES, read_json

MARK = "jaxpage_format"
VERSION = 1
MANIFEST_NAME = "manifest.json"
PARAMS_NAME = "params"


def is_own_config(values: dict[str, Any]) -> bool:
    """True for a config that `write_own_config` made, of whatever version."""
    return MARK in values


def write_own_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {MARK: VERSION, "model": asdict(config)}


def read_own_config(directory: Path) -> ModelConfig:
    """The inverse; CheckpointError for another version or a damaged file."""
    path = directory / "config.json"
    values = read_json(path, most=MOST_SETTINGS_BYTES)
    if values.get(MARK) != VERSION:
        raise CheckpointError(
            f"got {MARK}={short(values.get(MARK))} in {path}, wanted {VERSION}; "
            "convert the model again with this version"
        )
    model = values.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"got {path} without a model, wanted one; convert the model again")
    found = Fields(model, str(path))
    settings = _settings(found)
    family = family_named(str(model.get("architecture"))[:80])
    kinds = get_type_hints(family.config)
    found.refuse_unknown(kinds)
    settings |= {key: found.typed(key, kinds[key]) for key in kinds if key not in settings}
    try:
        return family.config(**settings)
    except ConfigError as error:
        raise CheckpointError(f"{error} ({path})") from None


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, empty if there is none: no arithmetic depends on it."""
    path = directory / MANIFEST_NAME
    return read_json(path, most=MOST_SETTINGS_BYTES) if path.exists() else {}


def noted_warnings(directory: Path) -> list[str]:
    """The warnings of the conversion, to be repeated at each load."""
    noted = read_manifest(directory).get("warnings", [])
    if not isinstance(noted, list) or not all(isinstance(line, str) for line in noted):
        raise CheckpointError(
            f"got warnings={short(noted)} in {directory / MANIFEST_NAME}, wanted a list of texts; "
            "convert the model again"
        )
    return noted


def converted_leaves(path: Path, config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of the leaves in a directory; CheckpointError if they don't fit."""
    shapes = leaf_shapes(config)
    found = {name: leaf.shape for name, leaf in stored_leaves(path / PARAMS_NAME).items()}
    check_leaves(found, shapes, str(path))
    return {
        name: jax.ShapeDtypeStruct(shape, NUMPY_DTYPES[config.dtype])
        for name, shape in shapes.items()
    }


def _settings(found: Fields) -> dict[str, Any]:
    """The fields of ModelConfig, all but the name of the family."""
    return {
        "vocab_size": found.integer("vocab_size"),
        "hidden_size": found.integer("hidden_size"),
        "intermediate_size": found.integer("intermediate_size"),
        "num_layers": found.integer("num_layers", most=MOST_LAYERS),
        "num_heads": found.integer("num_heads"),
        "num_kv_heads": found.integer("num_kv_heads"),
        "head_dim": found.integer("head_dim"),
        "max_position_embeddings": found.positions("max_position_embeddings"),
        "rms_norm_eps": found.number("rms_norm_eps"),
        "rope_theta": found.number("rope_theta"),
        "rope_scaling": _rope_scaling(found),
        "tie_word_embeddings": found.flag("tie_word_embeddings", False),
        "attention_bias": found.flag("attention_bias", False),
        "mlp_bias": found.flag("mlp_bias", False),
        "sliding_window": found.integer("sliding_window") if found.has("sliding_window") else None,
        "bos_token_id": found.token_id("bos_token_id"),
        "eos_token_ids": found.token_ids("eos_token_ids"),
        "dtype": found.dtype("dtype"),
    }


def _rope_scaling(found: Fields) -> RopeScaling | None:
    if not found.has("rope_scaling"):
        return None
    raw = found.values["rope_scaling"]
    if not isinstance(raw, dict) or raw.get("kind") not in ("linear", "dynamic", "llama3"):
        raise found.wrong("rope_scaling", raw, "a linear, dynamic or llama3 rule")
    rope = Fields(raw, f"rope_scaling of {found.source}")
    return RopeScaling(
        raw["kind"],
        rope.number("factor"),
        rope.positions("original_max_position_embeddings"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
    )
