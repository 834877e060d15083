"""The key-value part of a GGUF file, without its tensors.

The reader of the gguf package takes seconds over the half million strings of a vocabulary; this
one walks a memory map once. Knows nothing of what the keys mean.
Source of the layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from jaxpage.errors import CheckpointError

Scalar = str | int | float | bool
Value = Scalar | list["Value"]

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value type -> struct code; 8 is a string, 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """Every key of the file at `path`.

    Raises CheckpointError when it is not a whole GGUF file of version 2 or 3, little-endian.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GgufReader(data).metadata()
    except OSError as error:
        raise CheckpointError(
            f"got {path}, wanted a GGUF file that can be read ({error.strerror}); check the path"
        ) from error
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"got {path}, wanted a whole GGUF file ({error}); download or convert it again"
        ) from error


class GgufReader:
    """Walks the head of a GGUF file; convert goes on from it to the table of tensors.

    Raises ValueError or struct.error for a damaged file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0
        self.num_tensors = 0

    def metadata(self) -> dict[str, Value]:
        """Every key; afterwards `num_tensors` is known and `position` is the tensor table's."""
        magic = bytes(self._data[:4])
        if magic != GGUF_MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        self.position = 4
        version = self.number(_KIND)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are {_VERSIONS}")
        self.num_tensors = self.number(_LENGTH)
        num_keys = self.number(_LENGTH)
        return {self.string(): self._value(self.number(_KIND)) for _ in range(num_keys)}

    def number(self, layout: struct.Struct) -> int:
        """The next number of a layout."""
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        """The next string."""
        (length,) = _LENGTH.unpack_from(self._data, self.position)
        start = self.position + 8
        self.position = start + length
        raw = self._data[start : self.position]
        if len(raw) != length:
            raise ValueError(f"it ends inside a string of {length} bytes")
        return raw.decode("utf-8")

    def _value(self, kind: int, nesting: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(nesting + 1)
        if kind not in _CODES:
            raise ValueError(f"it holds a value of unknown type {kind}")
        return self.numbers(kind, 1)[0]

    def _array(self, nesting: int) -> list[Value]:
        kind, count = self.number(_KIND), self.number(_LENGTH)
        if count > len(self._data) - self.position or nesting > _MAX_NESTING:
            raise ValueError(f"it ends inside an array of {count} values")
        if kind in _CODES:
            return list(self.numbers(kind, count))
        return [self._value(kind, nesting) for _ in range(count)]

    def numbers(self, kind: int, count: int) -> tuple[Scalar, ...]:
        layout = struct.Struct(f"<{count}{_CODES[kind]}")
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values
