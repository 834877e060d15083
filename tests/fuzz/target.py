"""One reader under attack, as a value: how to write a whole input, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A reader and the files that it reads; every mutation of them must be read or refused."""

    name: str
    """"formats.gguf", "tokenizers.fast": the room and the kind."""
    write: Callable[[Path], Path]
    """Writes small whole files into an empty directory; returns what `read` is given."""
    read: Callable[[Path], object]
    """Reads all that a user would have read. It may return, or raise a JaxpageError."""
    mutated: tuple[str, ...]
    """Names of the files in the directory that are worth mutating."""
