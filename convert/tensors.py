"""One stored tensor, whatever file it lies in: what is known before reading, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jaxpage.config import DType


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
