"""Readers with the faults that are looked for, to see that they are found."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz.harness import MOST_GROWTH_BYTES
from tests.fuzz.target import Target

WHOLE = b"whole" * 20


def _write(directory: Path) -> Path:
    (directory / "file").write_bytes(WHOLE)
    return directory / "file"


def _die(path: Path) -> None:
    if path.read_bytes() != WHOLE:
        os._exit(3)


def _grow(path: Path) -> None:
    if path.read_bytes() != WHOLE:
        assert bytearray(b"x") * (MOST_GROWTH_BYTES + 2**26)


TARGETS = (
    Target("die", _write, _die, ("file",)),
    Target("grow", _write, _grow, ("file",)),
    Target("fine", _write, Path.read_bytes, ("file",)),
)
