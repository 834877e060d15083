"""A sentencepiece model written from its pieces, for files that hold only those.

Source of the field numbers: `sentencepiece_model.proto`. Wire form: a field is
`number * 8 + type` and its value; type 0 is a varint, 2 a length and bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_VARINT, _BYTES, _FLOAT = 0, 2, 5
_BPE = 2


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
    trainer = _number(3, _BPE) + _number(35, has_bytes)
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
