"""Each decoder that a tokenizer.json may name gives the text of the library that it comes from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxpage.errors import CheckpointError
from jaxpage.tokenizer import as_tokenizer


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.ByteLevel(),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
    ],
)
def test_each_decoder_is_followed(decoder: Any) -> None:
    words = [
        "\u2581a",
        "b\u2581",
        "\u2581\u2581",
        "<0xE6>",
        "<0x97>",
        "<0xA5>",
        "<0x20>",
        "c",
        "</s>",
    ]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "c"))
    backend.decoder = decoder
    backend.add_special_tokens(["</s>"])
    tokenizer, draw = as_tokenizer(backend), random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(len(words) + 1) for _ in range(draw.randrange(7))]
        for skip in (True, False):
            wanted = backend.decode(ids, skip_special_tokens=skip)
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            if not isinstance(decoder, decoders.Sequence) or "\ufffd" not in ours:
                assert ours == wanted  # see PieceStream for broken runs of bytes


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence(
            [
                *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
                decoders.Strip("x", 1, 0),
            ]
        ),
    ],
)
def test_a_decoder_that_is_not_known_is_refused(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="got a tokenizer whose decoder"):
        as_tokenizer(backend)
