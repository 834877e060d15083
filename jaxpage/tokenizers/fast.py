"""A tokenizer that the tokenizers library runs: `tokenizer.json` and what is turned into it.

Encoding is the library's. Decoding is ours, because it must go on token by token: the decoder of
the file is recognised and refused when it is none of the known ones; tests hold both to the same
text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import tokenizers
from tokenizers import processors

from jaxpage.errors import CheckpointError
from jaxpage.reading import answering
from jaxpage.tokenizers import byte_level
from jaxpage.tokenizers.base import (
    DescribedTokenizer,
    TextStream,
    TokenizerInfo,
    adds_special_tokens,
)
from jaxpage.tokenizers.streams import ByteStream, Piece, PieceStream, WordStream, spelt_byte

StreamMaker = Callable[[Callable[[int], str | None]], TextStream]
_CANNOT = "a text that the tokenizer can't take"


class FastTokenizer(DescribedTokenizer):
    """See `jaxpage.tokenizer.Tokenizer`. `backend` must not be changed afterwards."""

    def __init__(self, backend: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        super().__init__(info)
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._adds_bos = info.bos_token_id is not None and backend.encode("").ids[:1] == [
            info.bos_token_id
        ]
        contents = {index: token.content for index, token in added.items()}
        self._make_stream = _stream_maker(backend, contents)
        self._text_of = cache(backend.id_to_token)

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        adds = adds_special_tokens(text, add_special_tokens)
        with answering(_CANNOT, wanted="text that its model encodes", do="change the text"):
            ids = self.backend.encode(text, add_special_tokens=adds).ids
        return self._with_one_bos(ids) if adds and self._adds_bos else ids

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        hidden = self.special_ids if skip_special_tokens else frozenset()

        def token_of(token_id: int) -> str | None:
            return None if token_id in hidden else self._text_of(token_id)

        return self._make_stream(token_of)


def special_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """The ids of a backend's special tokens, by their text."""
    added = backend.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if token.special}


def put_bos_first(backend: tokenizers.Tokenizer, bos_token: str) -> None:
    """Makes `backend` put BOS before a text."""
    # Under the name "bos": a token's own text may read as "$A" or have a space or a colon.
    bos = {"id": "bos", "ids": [backend.token_to_id(bos_token)], "tokens": [bos_token]}
    backend.post_processor = processors.TemplateProcessing(
        single="bos:0 $A:0", pair="bos:0 $A:0 bos:1 $B:1", special_tokens=[bos]
    )


def _stream_maker(backend: tokenizers.Tokenizer, added: Mapping[int, str]) -> StreamMaker:
    """How the tokens of this tokenizer become text; `added` ones are their own text.

    In byte-level BPE the library reads the letters of an added token as bytes; here they are text.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        bytes_of = cache(byte_level.to_bytes)

        def bytes_of_id(token_id: int, token: str | None) -> bytes:
            return token.encode() if token and token_id in added else bytes_of(token or "")

        return lambda token_of: ByteStream(lambda i: bytes_of_id(i, token_of(i)))
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        piece_of = cache(_replacing(steps[0]))
        spaces = _leading_spaces(steps[3]) if len(steps) > 3 else 0
        return lambda token_of: PieceStream(
            lambda i: None if (token := token_of(i)) is None else piece_of(token),
            drop_spaces=spaces,
            drops_bytes=True,
        )
    if kinds == ["Metaspace"]:
        mark, drops = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        return lambda token_of: WordStream(
            token_of,
            first=lambda token: token.replace(mark, "" if drops else " "),
            later=lambda token: token.replace(mark, " "),
        )
    if not kinds:  # the library then joins tokens with spaces
        return lambda token_of: WordStream(token_of, first=str, later=lambda token: " " + token)
    raise CheckpointError(
        f"got a tokenizer whose decoder is {' + '.join(kinds)}, wanted ByteLevel, Metaspace, "
        "Replace + ByteFallback + Fuse (+ Strip), or none; "
        "check that tokenizer.json belongs to a model of the LLaMA family"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replacing(step: dict[str, Any]) -> Callable[[str], Piece]:
    old, new = step["pattern"].get("String"), step["content"]
    if not old:
        raise CheckpointError(
            f"got a tokenizer whose decoder replaces {step['pattern']}, wanted a text; "
            "check that tokenizer.json belongs to the model"
        )

    def piece(token: str) -> Piece:
        byte = spelt_byte(token)
        return token.replace(old, new) if byte is None else byte

    return piece


def _leading_spaces(step: dict[str, Any]) -> int:
    if step["content"] != " " or step["stop"]:
        raise CheckpointError(
            f"got a tokenizer whose decoder strips {step}, wanted leading spaces alone; "
            "check that tokenizer.json belongs to the model"
        )
    return step["start"]
