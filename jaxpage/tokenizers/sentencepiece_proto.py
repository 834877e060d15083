"""A sentencepiece model as bytes: written from pieces, and read for what the library hides.

Source of the field numbers: `sentencepiece_model.proto`. Wire form: a field is
`number * 8 + type` and its value; type 0 is a varint, 2 a length and bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, in GGUF files too."""
BPE = 2
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


class ModelParts(NamedTuple):
    """What a model says of itself."""

    pieces: list[tuple[str, float, int]]
    """Text, score and type, by id."""
    trainer: dict[int, Any]
    normalizer: dict[int, Any]

    @property
    def is_bpe(self) -> bool:
        return self.trainer.get(3, 1) == BPE

    @property
    def adds_space_prefix(self) -> bool:
        return bool(self.normalizer.get(3, 1))

    @property
    def removes_spaces(self) -> bool:
        return bool(self.normalizer.get(4, 1))

    @property
    def has_bytes(self) -> bool:
        return bool(self.trainer.get(35, 0))

    @property
    def changes_text(self) -> bool:
        """Whether it normalizes more than putting WORD_START where spaces are."""
        charsmap, escapes = self.normalizer.get(2, b""), self.normalizer.get(5, 1)
        return bool(charsmap or self.removes_spaces or not escapes)


def read_model_proto(model: bytes) -> ModelParts:
    """The parts of a model that the library has read already; for a damaged one raises whatever
    comes, so it is read behind `reading`."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode("utf-8"), piece.get(2, 0.0), piece.get(3, NORMAL)))
        elif number == 2:
            trainer.update(_fields(value))
        elif number == 3:
            normalizer.update(_fields(value))
    return ModelParts(pieces, trainer, normalizer)


def model_proto(
    pieces: Iterable[tuple[str, float, int]],
    *,
    special_ids: dict[str, int | None],
    has_bytes: bool,
    adds_space_prefix: bool,
) -> bytes:
    """A serialized BPE model of `pieces` (text, score, type), which changes no text.

    `special_ids`: of "unk", "bos", "eos" and "pad"; None where there is none.
    """
    vocabulary = b"".join(
        _field(1, _field(1, text.encode()) + _float(2, score) + _number(3, kind))
        for text, score, kind in pieces
    )
    trainer = _number(3, BPE) + _number(35, has_bytes)
    for number, name in enumerate(("unk", "bos", "eos", "pad"), start=40):
        token_id = special_ids[name]
        trainer += _number(number, -1 if token_id is None else token_id)
    normalizer = (
        _field(1, b"identity") + _number(3, adds_space_prefix) + _number(4, 0) + _number(5, 1)
    )
    return vocabulary + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    # A negative one is the varint of its two's complement in 64 bits.
    return _varint(number << 3 | _VARINT) + _varint(value % 2**64)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FLOAT) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
        else:
            size = {_DOUBLE: 8, _FLOAT: 4}.get(kind)
            if size is None:
                if kind != _BYTES:
                    raise ValueError(f"wire type {kind}")
                size, at = _read_varint(message, at)
            value, at = message[at : at + size], at + size
            if kind == _FLOAT:
                (value,) = struct.unpack("<f", value)
        yield tag >> 3, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
