"""One stored tensor of any kind of file: what is known before reading, and how to read it.

Files are mapped, so that nothing is read before it is needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from jaxpage.config import DType
from jaxpage.errors import CheckpointError
from jaxpage.reading import open_file

_LONGEST_NAME = 1000


@dataclass(frozen=True, slots=True)
class Tensor:
    """Name, shape and dtype from the header; `read` opens the data.

    `read` may return a read-only view of a memory map: copy before keeping it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    """The dtype `read` returns: a quantised GGUF tensor says float32."""
    num_bytes: int
    """Bytes in the file."""
    read: Callable[[], NDArray[Any]]


def checked_name(name: object) -> str:
    """A tensor's name in a file; ValueError for one that an error could not quote in a line."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ValueError(f"it has a tensor of the name {ascii(name)[:80]}")
    return name


def gathered(
    files: Iterable[tuple[Path, Mapping[str, Tensor]]], index: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors of several files; of two with one name, the one that the index points at."""
    tensors: dict[str, Tensor] = {}
    for path, found in files:
        for name, tensor in found.items():
            if name in tensors and name not in index:
                raise CheckpointError(
                    f"got tensor {name} twice, again in {path}, wanted it in one file; "
                    "remove files that the index does not name"
                )
            if name not in tensors or index[name] == path.name:
                tensors[name] = tensor
    return tensors


def map_file(path: Path, kind: str) -> mmap.mmap:
    """The bytes of a file, mapped read-only; CheckpointError if that fails, as for an empty one."""
    with open_file(path, wanted=f"a {kind} file") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
