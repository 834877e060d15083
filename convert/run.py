"""One conversion: open, check, write aside, put in place."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from convert.atomic_directory import atomic_directory
from convert.hf_export import export_hf
from convert.text_files import write_text_files
from jaxpage.config import DType
from jaxpage.errors import CapacityError, CheckpointError
from jaxpage.formats.converted import (
    MANIFEST_NAME,
    PARAMS_NAME,
    read_manifest,
    write_own_config,
)
from jaxpage.formats.locate import locate
from jaxpage.formats.model import StoredModel, open_model
from jaxpage.formats.orbax_io import save_leaves

Leaves = Iterable[tuple[str, NDArray[Any]]]
Progress = Callable[[Leaves, int], Leaves]
"""Passes leaves through and shows how many of a number have passed."""


def convert(
    source: str | Path,
    destination: Path,
    *,
    dtype: DType | Literal["auto"] = "auto",
    to: Literal["orbax", "hf"] = "orbax",
    overwrite: bool = False,
    progress: Progress = lambda leaves, _: leaves,
) -> list[str]:
    """Write `source` as a new directory; returns the warnings that were given on the way.

    `auto` keeps the stored dtype. CheckpointError for files that are not a whole model or a
    destination that may not be written, CapacityError when the disk is too small.
    """
    told: list[str] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        # First of all: if the destination can't be written, no download or work is wasted.
        atomic_directory(destination, overwrite=overwrite, tell=told.append) as directory,
    ):
        warnings.simplefilter("always")
        path = locate(source)
        if path.resolve().is_relative_to(destination.resolve()):
            # what a destination holds is replaced, and the source would go with it
            raise CheckpointError(
                f"got source {path} in the destination {destination}, wanted two places; "
                "choose another"
            )
        model = open_model(path)
        stored = model.config.dtype if dtype == "auto" else dtype
        require_disk(model.num_bytes(stored), directory, f"a model for {destination}")
        leaves = progress(model.leaves(stored), len(model.shapes))
        about_text = write_text_files(model, directory)
        if to == "hf":
            export_hf(model, leaves, directory, stored)
            return told + _messages(caught) + about_text
        save_leaves((directory / PARAMS_NAME).resolve(), leaves)
        config = write_own_config(replace(model.config, dtype=stored))
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        messages = _messages(caught)
        _write_manifest(directory, model, source=str(source), dtype=stored, warnings=messages)
        return told + messages + about_text


def require_disk(need_bytes: int, directory: Path, what: str) -> None:
    """CapacityError when `need_bytes` is more than what is free where `directory` lies."""
    have_bytes = shutil.disk_usage(directory).free
    if need_bytes > have_bytes:
        need, have = (f"{size / 2**30:.2f} GiB" for size in (need_bytes, have_bytes))
        raise CapacityError(
            f"got {what}, which needs {need}, and {have} free in {directory}, wanted it to fit; "
            "write elsewhere or use a smaller dtype"
        )


def _write_manifest(
    directory: Path, model: StoredModel, *, source: str, dtype: DType, warnings: Sequence[str]
) -> None:
    """Write source, sha256 of its weight files, dtype, shapes and warnings."""
    values: dict[str, Any] = {
        "source": source,
        "source_kind": model.kind,
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in model.files
        ],
        "dtype": dtype,
        "shapes": {path: list(shape) for path, shape in model.shapes.items()},
        "warnings": list(warnings),
    }
    if model.kind == "converted":
        values["converted_from"] = read_manifest(model.path)
    (directory / MANIFEST_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _messages(caught: list[warnings.WarningMessage]) -> list[str]:
    """The warnings that concern the model, without other packages' deprecations."""
    return [str(warning.message) for warning in caught if warning.category is UserWarning]
