"""Every reader of weights and settings as a target: tiny models, in each format that is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.run import convert
from jaxpage.checkpoint import load_weights
from jaxpage.formats.model import open_model
from tests.fuzz.target import Target
from tests.helpers.formats import random_model, write_gguf, write_hf, write_hf_bin, write_meta
from tests.helpers.formats.model_files import ModelFiles
from tests.helpers.formats.variants import BASE

SMALL: dict[str, Any] = BASE | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
GENERATION = b'{"bos_token_id": 1, "eos_token_id": [2, 5], "temperature": 0.6}'
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def small(**changes: Any) -> ModelFiles:
    model = random_model(SMALL | changes)
    return ModelFiles(model.config, model.weights, {"generation_config.json": GENERATION})


def read_leaves(path: Path) -> None:
    """Every leaf of the model, cast as a CPU casts it."""
    for _ in open_model(path).leaves("float32"):
        pass


def _to(
    write: Callable[..., Any], name: str = "", model: ModelFiles | None = None, **options: Any
) -> Callable[[Path], Path]:
    def written(directory: Path) -> Path:
        path = directory / name
        write(small() if model is None else model, path, **options)
        return path

    return written


def _write_converted(directory: Path) -> Path:
    """As `convert` writes it: the files of an Orbax checkpoint are in directories of their own."""
    write_hf(small(), directory / "source")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(directory / "source", directory / "out")
    return directory / "out"


def _write_old_bin(directory: Path) -> Path:
    """As PyTorch saved before 1.6: pickles one after another, then the numbers."""
    import torch

    path = write_hf_bin(small(), directory) / "pytorch_model.bin"
    state = torch.load(path)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return directory


def _files_of_converted() -> tuple[str, ...]:
    state = "out/params/state"
    return (
        "out/manifest.json",
        "out/generation_config.json",
        "out/params/*",
        f"{state}/*",
        f"{state}/*/*",
        f"{state}/*/*/*",
    )


SHARDS = tuple(f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
BIN_SHARDS = tuple(f"pytorch_model-{i:05}-of-00002.bin" for i in (1, 2))

TARGETS = (
    Target(
        "formats.safetensors", _to(write_hf, dtype="bfloat16"), read_leaves, ("model.safetensors",)
    ),
    Target(
        "formats.safetensors_shards",
        _to(write_hf, shards=2),
        read_leaves,
        (*SHARDS, "model.safetensors.index.json"),
    ),
    Target("formats.bin", _to(write_hf_bin), read_leaves, ("pytorch_model.bin",)),
    Target(
        "formats.bin_shards",
        _to(write_hf_bin, shards=2),
        read_leaves,
        (*BIN_SHARDS, "pytorch_model.bin.index.json"),
    ),
    Target("formats.bin_old", _write_old_bin, read_leaves, ("pytorch_model.bin",)),
    Target("formats.meta", _to(write_meta), read_leaves, ("consolidated.00.pth",)),
    Target(
        "formats.meta_shards",
        _to(write_meta, shards=2, embeddings="rows"),
        read_leaves,
        ("consolidated.00.pth", "consolidated.01.pth", "params.json"),
    ),
    Target("formats.gguf", _to(write_gguf, "model.gguf"), read_leaves, ("model.gguf",)),
    Target(
        "formats.gguf_quantised",
        _to(
            write_gguf,
            "model.gguf",
            small(hidden_size=32, rope_scaling=LLAMA3, head_dim=16),
            kind="Q8_0",
        ),
        read_leaves,
        ("model.gguf",),
    ),
    Target(
        "formats.hf_config",
        _to(write_hf, model=small(rope_scaling=LLAMA3)),
        read_leaves,
        ("config.json", "generation_config.json"),
    ),
    Target("formats.meta_config", _to(write_meta), read_leaves, ("params.json",)),
    Target("formats.own_config", _write_converted, load_weights, ("out/config.json",)),
    Target("formats.converted", _write_converted, load_weights, _files_of_converted()),
)
