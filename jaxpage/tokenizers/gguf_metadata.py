"""The key-value part of a GGUF file, without its tensors.

The reader of the gguf package takes seconds over the half million strings of a vocabulary; this
one walks a memory map once and makes a value only when it is looked up. Knows nothing of what the
keys mean.
Source of the layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpage.errors import CheckpointError
from jaxpage.reading import open_file, reading

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

GGUF_MAGIC = b"GGUF"
MOST_ENTRIES = 4_000_000
"""Of an array that is made a list; the largest vocabulary known has 262,144 tokens."""
_VERSIONS = (2, 3)
# Value type -> struct code; 8 is a string, 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_KEY = 65535
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_LAYOUTS = {kind: struct.Struct("<" + code) for kind, code in _CODES.items()}


def read_gguf_metadata(path: Path) -> Mapping[str, Value]:
    """Every key of the file at `path`; a value is read when it is looked up.

    Raises CheckpointError when it is not a whole GGUF file of version 2 or 3, little-endian.
    """
    wanted = "a whole GGUF file"
    with open_file(path, wanted=wanted) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with reading(path, wanted):
        return GgufReader(data, str(path)).metadata()


class Metadata(Mapping[str, Value]):
    """Keys and where their values begin; looking one up reads it."""

    def __init__(self, data: mmap.mmap, source: str, places: dict[str, tuple[int, int]]) -> None:
        """`places`: key -> (kind, position) of its value."""
        self._data = data
        self._source = source
        self._places = places
        self._known: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        kind, position = self._places[key]
        if key not in self._known:
            with reading(f"{key} in {self._source}", "a value of its type"):
                reader = GgufReader(self._data, f"{key} in {self._source}", position)
                self._known[key] = reader.value(kind)
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class GgufReader:
    """Walks the head of a GGUF file; `formats.gguf_io` goes on to the table of tensors.

    Raises ValueError or struct.error for a damaged file.
    """

    def __init__(self, data: mmap.mmap, source: str, position: int = 0) -> None:
        self._data = data
        self._source = source
        self.position = position
        self.num_tensors = 0

    def metadata(self) -> Metadata:
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
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            key = self.string(most=_LONGEST_KEY)
            kind = self.number(_KIND)
            places[key] = (kind, self.position)
            self._skip(kind)
        return Metadata(self._data, self._source, places)

    def number(self, layout: struct.Struct) -> int:
        """The next number of a layout."""
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def string(self, *, most: int | None = None) -> str:
        """The next string; bytes that are no UTF-8 are replaced, with a warning."""
        (length,) = _LENGTH.unpack_from(self._data, self.position)
        start = self.position + 8
        self.position = start + length
        if self.position > len(self._data) or (most is not None and length > most):
            raise ValueError(f"it ends inside a string of {length} bytes")
        raw = self._data[start : self.position]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            warnings.warn(
                f"{self._source} holds text that isn't UTF-8; what isn't is replaced",
                stacklevel=2,
            )
            return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Value:
        """The next value, of a kind."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_LAYOUTS[kind])
        inner, count = self._head_of_array()
        if count > MOST_ENTRIES:
            raise CheckpointError(
                f"got {count} entries of {self._source}, wanted at most {MOST_ENTRIES}; "
                "convert the model again"
            )
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        layout = struct.Struct(f"<{count}{_CODES[inner]}")
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return list(values)

    def _head_of_array(self) -> tuple[int, int]:
        kind, count = self.number(_KIND), self.number(_LENGTH)
        if kind not in _LAYOUTS and kind != _STRING:  # llama.cpp reads no arrays of arrays
            raise ValueError(f"it holds an array of values of unknown type {kind}")
        least = _LENGTH.size if kind == _STRING else _LAYOUTS[kind].size
        if count * least > len(self._data) - self.position:
            raise ValueError(f"it ends inside an array of {count} values")
        return kind, count

    def _skip(self, kind: int) -> None:
        """Skips a value without making it."""
        count = 1
        if kind == _ARRAY:
            kind, count = self._head_of_array()
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _LAYOUTS:
            self.position += count * _LAYOUTS[kind].size
        else:
            raise ValueError(f"it holds a value of unknown type {kind}")
        if self.position > len(self._data):
            raise ValueError("it ends inside a value")

    def _skip_strings(self, count: int) -> None:
        data, position, unpack = self._data, self.position, _LENGTH.unpack_from
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        self.position = position
