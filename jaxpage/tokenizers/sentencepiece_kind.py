"""A tokenizer that the sentencepiece library runs: `tokenizer.model` and what is turned into it.

The library treats "<s>" in a text as three characters. Here, as in Hugging Face, special tokens
become their ids, and the text between them is encoded part by part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import sentencepiece

from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import DescribedTokenizer, TextStream, TokenizerInfo
from jaxpage.tokenizers.streams import Piece, PieceStream

WORD_START = "\u2581"
# Fields of a serialized message that come twice are merged, the later wins: this one, appended to
# a model, is `normalizer_spec { add_dummy_prefix: false }`.
_NO_SPACE_BEFORE_TEXT = bytes([0x1A, 2, 0x18, 0])


class AddedToken(NamedTuple):
    """A token beside the model's pieces."""

    text: str
    is_special: bool


class SentencePieceTokenizer(DescribedTokenizer):
    """See `jaxpage.tokenizer.Tokenizer`.

    `prefixes_every_part`: the space that the model puts before a text goes before each part
    between special tokens too, as in Meta's and Hugging Face's `legacy` form; otherwise only
    before a part at the very start of the text.
    Unlike `sentencepiece.decode`, skipping special tokens skips "<unk>" too, and see `PieceStream`
    for bytes that are no UTF-8.
    """

    def __init__(
        self,
        model: bytes,
        info: TokenizerInfo,
        *,
        added: Mapping[int, AddedToken] | None = None,
        prefixes_every_part: bool = True,
    ) -> None:
        super().__init__(info)
        self.model = model
        self.added = dict(added or {})
        self.prefixes_every_part = prefixes_every_part
        self._processor = processor = processor_of(model)
        self._bare = (
            processor if prefixes_every_part else processor_of(model + _NO_SPACE_BEFORE_TEXT)
        )
        size = processor.GetPieceSize()
        self.vocab_size = max(size, 1 + max(self.added, default=-1))
        pieces = [i for i in range(size) if processor.IsControl(i) or processor.IsUnknown(i)]
        special_added = [i for i, token in self.added.items() if token.is_special]
        self.special_ids = frozenset(pieces + special_added)
        self._id_of = {processor.IdToPiece(i): i for i in pieces}
        self._id_of |= {token.text: i for i, token in self.added.items()}
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self._leading_spaces = _num_dropped_spaces(processor)
        self._piece_of = cache(self._find_piece)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        adds_bos = add_special_tokens and self.info.adds_bos
        ids = [self.info.bos_token_id] if adds_bos and self.info.bos_token_id is not None else []
        done = 0
        for match in self._special.finditer(text):
            ids += self._encode_part(text, done, match.start())
            ids.append(self._id_of[match.group()])
            done = match.end()
        ids += self._encode_part(text, done, len(text))
        return self._with_one_bos(ids) if adds_bos else ids

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return PieceStream(
            lambda i: None if i in hidden else self._piece_of(i),
            drop_spaces=self._leading_spaces,
        )

    def named_tokens(self) -> dict[int, AddedToken]:
        """The tokens that are recognised in a text before it is encoded, by id."""
        return {
            token_id: AddedToken(text, token_id in self.special_ids)
            for text, token_id in sorted(self._id_of.items(), key=lambda item: item[1])
        }

    def _encode_part(self, text: str, start: int, end: int) -> list[int]:
        if start == end:
            return []
        has_prefix = start == 0 or self.prefixes_every_part
        return (self._processor if has_prefix else self._bare).EncodeAsIds(text[start:end])

    def _find_piece(self, token_id: int) -> Piece:
        if token_id in self.added:
            return self.added[token_id].text
        if not 0 <= token_id < self._processor.GetPieceSize():
            return None
        piece = self._processor.IdToPiece(token_id)
        if self._processor.IsByte(token_id):
            return int(piece[3:5], 16)
        return piece.replace(WORD_START, " ")


def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """The library's object for a serialized model; CheckpointError when it is none."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter: its message quotes bytes
        raise CheckpointError(
            f"got a sentencepiece model that can't be read ({error}), wanted a whole one; "
            "download tokenizer.model again"
        ) from error
    return processor


def _num_dropped_spaces(processor: sentencepiece.SentencePieceProcessor) -> int:
    """How many spaces at the start of a text decoding leaves out: none, the one, or all."""
    if processor.DecodePieces([WORD_START, WORD_START + "a"]) == "a":
        return sys.maxsize
    return int(processor.DecodePieces([WORD_START + "a"]) == "a")
