"""A tokenizer that the sentencepiece library runs: `tokenizer.model` and what is turned into it.

The library treats "<s>" in a text as three characters. Here, as in Hugging Face, special tokens
become their ids, and the text between them is encoded part by part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache

import sentencepiece
from tokenizers import AddedToken

from jaxpage.errors import CheckpointError
from jaxpage.reading import answering, reading
from jaxpage.tokenizers.base import (
    DescribedTokenizer,
    TextStream,
    TokenizerInfo,
    adds_special_tokens,
)
from jaxpage.tokenizers.sentencepiece_proto import ModelParts, read_model_proto
from jaxpage.tokenizers.streams import Piece, PieceStream, spelt_byte

WORD_START = "\u2581"
# Fields of a serialized message that come twice are merged, the later wins: this one, appended to
# a model, is `normalizer_spec { add_dummy_prefix: false }`.
_NO_SPACE_BEFORE_TEXT = bytes([0x1A, 2, 0x18, 0])


class SentencePieceTokenizer(DescribedTokenizer):
    """See `jaxpage.tokenizer.Tokenizer`.

    `added`: tokens beside the model's pieces, or pieces that are cut out of a text before it is
    encoded; by id. `prefixes_every_part`: the space that the model puts before a text goes before
    each part between special tokens too, as in Meta's and Hugging Face's `legacy` form; otherwise
    only before a part at the very start of the text. `prefixes_text`: False for a text without
    that space whatever the model says. `source` names the file in errors. Unlike
    `sentencepiece.decode`, skipping special tokens skips "<unk>" too.
    """

    def __init__(
        self,
        model: bytes,
        info: TokenizerInfo,
        *,
        added: Mapping[int, AddedToken] | None = None,
        prefixes_every_part: bool = True,
        prefixes_text: bool = True,
        source: str = "a sentencepiece model",
    ) -> None:
        super().__init__(info)
        self.model = model if prefixes_text else model + _NO_SPACE_BEFORE_TEXT
        self.added = dict(added or {})
        self.prefixes_every_part = prefixes_every_part
        self._processor = processor = processor_of(self.model, source)
        self._bare = (
            processor
            if prefixes_every_part
            else processor_of(self.model + _NO_SPACE_BEFORE_TEXT, source)
        )
        with reading(source, "a whole sentencepiece model"):
            self._leading_spaces = _num_dropped_spaces(read_model_proto(self.model))
            self._name_tokens(processor)
        self._piece_of = cache(self._find_piece)

    def _name_tokens(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        size = processor.GetPieceSize()
        self.vocab_size = max(size, 1 + max(self.added, default=-1))
        pieces = [i for i in range(size) if processor.IsControl(i) or processor.IsUnknown(i)]
        special = [i for i in pieces if i not in self.added]
        special += [i for i, token in self.added.items() if token.special]
        self.special_ids = frozenset(special)
        self._id_of = {processor.IdToPiece(i): i for i in special if i not in self.added}
        self._id_of |= {token.content: i for i, token in self.added.items()}
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self._named = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        adds_bos = adds_special_tokens(text, add_special_tokens) and self.info.adds_bos
        ids = [self.info.bos_token_id] if adds_bos and self.info.bos_token_id is not None else []
        done = 0
        for token_id, start, end in self._tokens_in(text):
            ids += self._encode_part(text, done, start)
            ids.append(token_id)
            done = end
        ids += self._encode_part(text, done, len(text))
        return self._with_one_bos(ids) if adds_bos else ids

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return PieceStream(
            lambda i: None if i in hidden else self._piece_of(i),
            drop_spaces=self._leading_spaces,
            drops_bytes=False,
        )

    def named_tokens(self) -> dict[int, AddedToken]:
        """The tokens that are recognised in a text before it is encoded, by id."""
        pieces = {
            token_id: AddedToken(text, special=True, normalized=False)
            for text, token_id in self._id_of.items()
            if token_id not in self.added
        }
        return dict(sorted((pieces | self.added).items()))

    def _tokens_in(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Id, start and end of each named token; its flags as the tokenizers library has them."""
        done = at = 0
        while (match := self._named.search(text, at)) is not None:
            token_id = self._id_of[match.group()]
            flags, (start, at) = self.added.get(token_id), match.span()
            if flags is not None and flags.single_word and _is_in_a_word(text, start, at):
                continue
            while flags is not None and flags.lstrip and start > done and text[start - 1].isspace():
                start -= 1
            while flags is not None and flags.rstrip and at < len(text) and text[at].isspace():
                at += 1
            yield token_id, start, at
            done = at

    def _encode_part(self, text: str, start: int, end: int) -> list[int]:
        if start == end:
            return []
        has_prefix = start == 0 or self.prefixes_every_part
        processor = self._processor if has_prefix else self._bare
        with answering(
            "a text that the tokenizer can't take", wanted="Unicode text", do="change the text"
        ):
            return processor.EncodeAsIds(text[start:end])

    def _find_piece(self, token_id: int) -> Piece:
        if token_id in self.added:  # the library finds spaces by such a piece, too
            return self.added[token_id].content.replace(WORD_START, " ")
        if not 0 <= token_id < self._processor.GetPieceSize():
            return None
        piece = self._processor.IdToPiece(token_id)
        byte = spelt_byte(piece) if self._processor.IsByte(token_id) else None
        return piece.replace(WORD_START, " ") if byte is None else byte


def processor_of(
    model: bytes, source: str = "a sentencepiece model"
) -> sentencepiece.SentencePieceProcessor:
    """The library's object for a serialized model; CheckpointError when it is none."""
    processor = sentencepiece.SentencePieceProcessor()
    with reading(source, "a whole sentencepiece model"):
        processor.LoadFromSerializedProto(model)
        if not processor.GetPieceSize():
            raise CheckpointError(f"got {source} without a piece, wanted some; download it again")
    return processor


def _num_dropped_spaces(parts: ModelParts) -> int:
    """How many spaces decoding drops at the start of a text: none, one, or all."""
    return sys.maxsize if parts.removes_spaces else int(parts.adds_space_prefix)


def _is_in_a_word(text: str, start: int, end: int) -> bool:
    around = text[max(0, start - 1) : start] + " " + text[end : end + 1]
    return re.search(r"\w", around) is not None
