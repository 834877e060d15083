"""The key-value part of a GGUF file, without its tensors.

The reader of the gguf package takes seconds over the half million strings of a vocabulary; this
one walks a memory map once. Knows nothing of what the keys mean.
Source of the layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
import warnings
from pathlib import Path

from jaxpage.errors import CheckpointError
from jaxpage.reading import reading

Scalar = str | int | float | bool
Value = Scalar | list["Value"]

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value type -> struct code; 8 is a string, 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MOST_VALUES, _MOST_TEXT_BYTES = 1 << 22, 64 << 20
"""Of a whole file; the largest vocabulary known has 262,144 tokens and 580,604 merges."""
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """Every key of the file at `path`, but numbers by the million, which no model needs.

    Raises CheckpointError when it is not a whole GGUF file of version 2 or 3, little-endian.
    """
    with reading(path, "a whole GGUF file"):
        if not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"got {path}, wanted a GGUF file; check the path")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GgufReader(data).metadata()


class GgufReader:
    """Walks the head of a GGUF file; convert goes on from it to the table of tensors.

    Raises ValueError or struct.error for a damaged file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._values_left, self._bytes_left = _MOST_VALUES, _MOST_TEXT_BYTES
        self._repairs_text = False
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
        found: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self.string()
            # What people write about a model is not worth refusing it for.
            self._repairs_text = key.startswith("general.")
            value = self._value(self.number(_KIND))
            if value is None:
                warnings.warn(
                    f"the GGUF file's {key} is left out: it has more numbers than any model needs",
                    stacklevel=2,
                )
            else:
                found[key] = value
        return found

    def number(self, layout: struct.Struct) -> int:
        """The next number of a layout."""
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        """The next string."""
        (length,) = _LENGTH.unpack_from(self._data, self.position)
        start = self.position + 8
        if length > len(self._data) - start:
            raise ValueError(f"it ends inside a string of {length} bytes")
        self._bytes_left -= length
        self._take(1)
        self.position = start + length
        raw = self._data[start : self.position]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if not self._repairs_text:
                raise
        warnings.warn("the GGUF file describes itself in text that is no UTF-8", stacklevel=2)
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int, nesting: int = 0) -> Value | None:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(nesting + 1)
        if kind not in _CODES:
            raise ValueError(f"it holds a value of unknown type {kind}")
        self._take(1)
        return self.numbers(kind, 1)[0]

    def _array(self, nesting: int) -> list[Value] | None:
        """An array; None in place of more numbers than are kept."""
        kind, count = self.number(_KIND), self.number(_LENGTH)
        if count > len(self._data) - self.position or nesting > _MAX_NESTING:
            raise ValueError(f"it ends inside an array of {count} values")
        if kind not in _CODES:
            if count > self._values_left:
                raise ValueError(f"it holds {count} values under one key")
            values = [self._value(kind, nesting) for _ in range(count)]
            return [value for value in values if value is not None]
        if count <= self._values_left:
            self._take(count)
            return list(self.numbers(kind, count))
        self.position += count * struct.calcsize(f"<{_CODES[kind]}")
        if self.position > len(self._data):
            raise ValueError(f"it ends inside an array of {count} values")
        return None

    def _take(self, count: int) -> None:
        self._values_left -= count
        if self._values_left < 0 or self._bytes_left < 0:
            raise ValueError("its keys hold more than any model's")

    def numbers(self, kind: int, count: int) -> tuple[Scalar, ...]:
        layout = struct.Struct(f"<{count}{_CODES[kind]}")
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values
