"""Incremental decoding of the kinds of vocabulary.

A token's piece is bytes, or text, or one byte of a character that the vocabulary lacks (an int),
or nothing (None). Constant work a token, and nothing is ever taken back: text that a later token
could still change is held in `pending`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

REPLACEMENT = "\ufffd"
Piece = str | int | None


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
    """Text with byte tokens between, as the `ByteFallback` decoder of the tokenizers library.

    A run (byte tokens that follow each other) that is not UTF-8 becomes one U+FFFD a byte, the
    bytes of whole characters too. So a run is held back for as long as it is valid.
    sentencepiece itself keeps the whole characters of such a run; one model shall give one text,
    whichever of its files was read.
    """

    def __init__(self, piece_of: Callable[[int], Piece], *, drop_spaces: int) -> None:
        self._piece_of = piece_of
        self._drop_spaces = drop_spaces  # at the very start of the text
        self._run = bytearray()
        self._is_broken = False
        self._checker = codecs.getincrementaldecoder("utf-8")()

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        text = self._push_byte(piece) if isinstance(piece, int) else self._end_run() + piece
        shown = self._without_spaces(text)
        self._drop_spaces -= len(text) - len(shown)
        if shown:
            self._drop_spaces = 0
        return shown

    @property
    def pending(self) -> str:
        return self._without_spaces(self._held())

    def _push_byte(self, value: int) -> str:
        if self._is_broken:
            return REPLACEMENT
        self._run.append(value)
        try:
            self._checker.decode(bytes((value,)))
        except UnicodeDecodeError:
            self._is_broken = True
            text = REPLACEMENT * len(self._run)
            self._run.clear()
            return text
        return ""

    def _end_run(self) -> str:
        text = self._held()
        self._run.clear()
        self._is_broken = False
        self._checker.reset()
        return text

    def _held(self) -> str:
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)

    def _without_spaces(self, text: str) -> str:
        return text[min(self._drop_spaces, len(text) - len(text.lstrip(" "))) :]


class WordStream:
    """Tokens that are text of their own, the first of which is written otherwise than the rest."""

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
