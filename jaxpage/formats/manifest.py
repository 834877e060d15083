"""`manifest.json`: where a converted directory came from, and what was noticed on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpage.config import DType
from jaxpage.errors import CheckpointError
from jaxpage.fields import MOST_SETTINGS_BYTES, short
from jaxpage.formats.model import StoredModel
from jaxpage.reading import read_json

MANIFEST_NAME = "manifest.json"


def write_manifest(
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


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, or nothing where there is none: no arithmetic depends on it."""
    path = directory / MANIFEST_NAME
    return read_json(path, most=MOST_SETTINGS_BYTES) if path.exists() else {}


def noted_warnings(directory: Path) -> list[str]:
    """What a conversion noticed, to be told at each load."""
    noted = read_manifest(directory).get("warnings", [])
    if not isinstance(noted, list) or not all(isinstance(line, str) for line in noted):
        raise CheckpointError(
            f"got warnings={short(noted)} in {directory / MANIFEST_NAME}, wanted a list of texts; "
            "convert the model again"
        )
    return noted


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
