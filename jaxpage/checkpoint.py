"""From a model's name or path to the model: (ModelConfig, params, tokenizer).

`jaxpage.formats` reads the files; this module puts the arrays on the device.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from jaxpage.config import DTYPES, DType, ModelConfig
from jaxpage.device.placement import put
from jaxpage.errors import CapacityError, ConfigError
from jaxpage.formats.assemble import LeafPlan, num_bytes, plan_leaves, read_leaf
from jaxpage.formats.converted import PARAMS_NAME, converted_leaves, noted_warnings, read_own_config
from jaxpage.formats.locate import locate
from jaxpage.formats.orbax_io import read_leaves
from jaxpage.formats.sources import detect, find_tokenizer, open_source
from jaxpage.formats.tree import nest
from jaxpage.memory import free_bytes
from jaxpage.terms import default_device
from jaxpage.tokenizer import Tokenizer, load_tokenizer

__all__ = ["load", "load_weights"]


def load(
    name_or_path: str | Path, dtype: DType | Literal["auto"] = "float32"
) -> tuple[ModelConfig, dict[str, Any], Tokenizer | None]:
    """Config, parameters on the default device, and tokenizer of a model, None if it has none.

    `auto` keeps the stored dtype. CheckpointError for files that don't hold a whole model,
    CapacityError for one that doesn't fit in memory.
    """
    path = locate(name_or_path)
    config, params = load_weights(path, dtype)
    place = find_tokenizer(path)
    return config, params, None if place is None else load_tokenizer(place)


def load_weights(
    name_or_path: str | Path, dtype: DType | Literal["auto"] = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and parameters alone, as for `load`."""
    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(
            f"got dtype {dtype!r}, wanted auto or one of {', '.join(DTYPES)}; choose one"
        )
    path = locate(name_or_path)
    if detect(path) == "converted":
        return _load_converted(path, dtype)
    source = open_source(path)
    config = _with_dtype(source.config, dtype)
    plans = plan_leaves(config, source.tensors, source.rules, str(path))
    _require_room(num_bytes((plan.shape for plan in plans), config.dtype), path, config)

    device = default_device()  # read here: each thread has its own settings of JAX

    def read(plan: LeafPlan) -> tuple[str, jax.Array]:
        leaf = read_leaf(plan, config.dtype)
        with jax.default_device(device):
            return plan.path, put(leaf)

    # NumPy releases the GIL while it copies, so the threads decode in parallel.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return config, nest(dict(pool.map(read, plans)))


def _load_converted(
    path: Path, dtype: DType | Literal["auto"]
) -> tuple[ModelConfig, dict[str, Any]]:
    config = _with_dtype(read_own_config(path), dtype)
    wanted = converted_leaves(path, config)
    _require_room(num_bytes((leaf.shape for leaf in wanted.values()), config.dtype), path, config)
    for message in noted_warnings(path):
        warnings.warn(message, stacklevel=3)
    leaves = read_leaves(path / PARAMS_NAME, wanted)
    return config, nest({name: put(leaf) for name, leaf in leaves})


def _with_dtype(config: ModelConfig, dtype: DType | Literal["auto"]) -> ModelConfig:
    return config if dtype == "auto" else replace(config, dtype=dtype)


def _require_room(need_bytes: int, path: Path, config: ModelConfig) -> None:
    """CapacityError when the parameters are larger than what the default device has left."""
    have = free_bytes()
    if have is not None and need_bytes > have:
        raise CapacityError(
            f"got the model {path} in {config.dtype}, which needs {need_bytes / 2**30:.2f} GiB, "
            f"wanted at most the {have / 2**30:.2f} GiB of memory left for "
            f"{default_device().platform}; use a smaller dtype or model"
        )
