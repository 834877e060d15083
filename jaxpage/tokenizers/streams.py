"""Incremental decoding of the kinds of vocabulary.

A token's piece is bytes, or text, or one byte of a character that the vocabulary lacks (an int),
or nothing (None). Constant work a token, and nothing is ever taken back: text that a later token
could still change is held in `pending`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

REPLACEMENT = "\ufffd"
Piece = str | int | None
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelt_byte(token: str) -> int | None:
    """The byte that a token like "<0x0A>" stands for; None for every other token."""
    match = _BYTE.fullmatch(token)
    return None if match is None else int(match[1], 16)


class ByteStream:
    """Every token is bytes (byte-level BPE); a character may span tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    @property
    def pending(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", errors="replace")


class PieceStream:
    """Text with byte tokens between: a run of them is characters as far as it is UTF-8.

    A character is shown as soon as its last byte is there; a byte that is part of none is one
    U+FFFD, as in sentencepiece and llama.cpp. The `ByteFallback` decoder of the tokenizers library
    makes U+FFFD of the whole characters in such a run too, which only the run's end can tell.

    `drop_spaces`: how many spaces are left out at the very start of the text; spaces spelt by byte
    tokens count only if `drops_bytes`.
    """

    def __init__(
        self, piece_of: Callable[[int], Piece], *, drop_spaces: int, drops_bytes: bool
    ) -> None:
        self._piece_of = piece_of
        self._drop_spaces = drop_spaces
        self._drops_bytes = drops_bytes
        self._half = b""
        """The first bytes of a character; at most three."""

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        if isinstance(piece, int):
            return self._shown(self._push_byte(piece), is_bytes=True)
        ended = self._shown(self.pending, is_bytes=True)
        self._half = b""
        return ended + self._shown(piece, is_bytes=False)

    @property
    def pending(self) -> str:
        return REPLACEMENT * len(self._half)

    def _push_byte(self, value: int) -> str:
        text, half = "", self._half + bytes((value,))
        while half and not _may_become_a_character(half):
            try:
                text, half = text + half.decode("utf-8"), b""
            except UnicodeDecodeError:
                text, half = text + REPLACEMENT, half[1:]
        self._half = half
        return text

    def _shown(self, text: str, *, is_bytes: bool) -> str:
        spaces = len(text) - len(text.lstrip(" ")) if self._drops_bytes or not is_bytes else 0
        dropped = min(self._drop_spaces, spaces)
        self._drop_spaces = 0 if len(text) > dropped else self._drop_spaces - dropped
        return text[dropped:]


def _may_become_a_character(half: bytes) -> bool:
    """Whether bytes are the beginning of a character and not all of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(half) == ""
    except UnicodeDecodeError:
        return False


class WordStream:
    """Every token is a text; the first is written by another rule than the rest."""

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        *,
        first: Callable[[str], str],
        later: Callable[[str], str],
    ) -> None:
        self._token_of = token_of
        self._write = first
        self._later = later

    def push(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None:
            return ""
        text, self._write = self._write(token), self._later
        return text

    @property
    def pending(self) -> str:
        return ""
