"""The alphabet of byte-level BPE: a printable character for each of the 256 bytes.

Bytes that are printable Latin-1 stand for themselves; the others, in order, are the characters
from U+0100 on: the space is "\u0120", the line feed "\u010a".
Source: `encoder.py` of GPT-2.
"""

from __future__ import annotations

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)
}
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def to_chars(data: bytes) -> str:
    return data.decode("latin-1").translate(CHAR_OF_BYTE)


def to_bytes(token: str) -> bytes:
    """The bytes a token stands for; one outside the alphabet is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
