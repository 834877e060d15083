"""Writes Hugging Face folders: safetensors, whole or in shards, and the older `.bin`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.helpers.formats.model_files import ModelFiles, Weights

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_hf(model: ModelFiles, folder: Path, *, shards: int = 1, dtype: str = "float32") -> Path:
    """Writes safetensors as Hugging Face does, with an index when `shards` > 1."""
    _write_sides(model, folder, dtype)
    weights = {name: value.astype(DTYPES[dtype]) for name, value in model.weights.items()}
    for name, part in _parts(weights, shards, "model", "safetensors", folder).items():
        save_file(part, folder / name, metadata={"format": "pt"})
    return folder


def write_hf_bin(
    model: ModelFiles, folder: Path, *, shards: int = 1, dtype: str = "float32"
) -> Path:
    """Writes `pytorch_model.bin`; needs torch."""
    import torch

    _write_sides(model, folder, dtype)
    kind: Any = getattr(torch, dtype)
    weights = {name: torch.from_numpy(value).to(kind) for name, value in model.weights.items()}
    for name, part in _parts(weights, shards, "pytorch_model", "bin", folder).items():
        torch.save(part, folder / name)
    return folder


def _write_sides(model: ModelFiles, folder: Path, dtype: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(model.config | {"torch_dtype": dtype}, indent=2)
    (folder / "config.json").write_text(config + "\n")
    for name, content in model.side_files.items():
        (folder / name).write_bytes(content)


def _parts(
    weights: dict[str, Any], shards: int, stem: str, suffix: str, folder: Path
) -> dict[str, Weights]:
    """Deals the tensors out to files in turn, so that every layer straddles files."""
    if shards == 1:
        return {f"{stem}.{suffix}": weights}
    parts: dict[str, Weights] = {
        f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}": {} for i in range(shards)
    }
    names = tuple(parts)
    where = {name: names[i % shards] for i, name in enumerate(weights)}
    for name, file in where.items():
        parts[file][name] = weights[name]
    size = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return parts
