"""Each decoder that a tokenizer.json may name gives the text of the library that it comes from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models

from jaxpage.errors import CheckpointError
from jaxpage.tokenizer import TokenizerInfo, as_tokenizer
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer
from tests.tokenizers.kinds import sentencepiece_model


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


def test_characters_of_a_run_of_bytes_are_shown_as_they_complete() -> None:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = as_tokenizer(backend)
    text = "မင်္ဂလာပါ 日é😀"
    stream, shown = tokenizer.stream(), ""
    for byte in text.encode():
        shown += stream.push(1 + byte)
        assert text.startswith(shown)
        assert shown == text.encode()[: len(shown.encode())].decode()
    assert (shown, stream.pending) == (text, "")


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_run_keeps_its_whole_characters(seed: int) -> None:
    """As sentencepiece; the text of a stream is that of decoding, and only grows."""
    draw = random.Random(seed)
    model = sentencepiece_model()
    ours, theirs = load_bytes(model), sentencepiece.SentencePieceProcessor(model_proto=model)
    first = theirs.PieceToId("<0x00>")
    data = b"".join(
        draw.choice(
            (b"a", "é".encode(), "日".encode(), "😀".encode(), b"\xff", b"\xe6\x97", b"\xf0")
        )
        for _ in range(30)
    )
    ids = [first + byte for byte in data]
    stream = ours.stream()
    shown = [stream.push(token_id) for token_id in ids]
    assert "".join(shown) + stream.pending == ours.decode(ids) == theirs.decode(ids)


def load_bytes(model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model, TokenizerInfo())
