"""Write a directory aside and put it in place as the last act, so that half of one never shows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpage.errors import CheckpointError


@contextmanager
def written_aside(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory that becomes `destination` when the block ends well, else vanishes.

    CheckpointError when `destination` exists and may not be replaced: only a model directory may,
    so that a slip of the keyboard doesn't cost a home directory.
    """
    _check(destination, overwrite=overwrite)
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(
        tempfile.mkdtemp(
            prefix=f".{destination.name}.", suffix=".unfinished", dir=destination.parent
        )
    )
    try:
        new = aside / "new"
        new.mkdir()
        yield new
        if destination.exists():
            destination.rename(aside / "old")
        new.rename(destination)
    finally:
        old = aside / "old"
        if old.exists() and not destination.exists():
            old.rename(destination)
        shutil.rmtree(aside, ignore_errors=True)


def _check(destination: Path, *, overwrite: bool) -> None:
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError(
            f"got the file {destination} as destination, wanted a new directory; choose another"
        )
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"got destination {destination} that exists, wanted a new directory; "
            "choose another or add --overwrite"
        )
    if not (destination / "config.json").exists():
        raise CheckpointError(
            f"got --overwrite for {destination}, which holds no model (no config.json), wanted a "
            "directory that convert wrote; choose another"
        )
