"""Llama 3's file: the ids are tiktoken's, the special tokens Meta's."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.tokenizers.fast import FastTokenizer
from jaxpage.tokenizers.pretokenizers import LLAMA3_PATTERN
from jaxpage.tokenizers.tiktoken_file import (
    SPECIAL_TOKENS,
    is_tiktoken,
    tokenizer_from_tiktoken,
)
from tests.tokenizers.kinds import HARD_TEXTS, SENTENCE, sentencepiece_model, tiktoken_file

tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken to compare with")


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    return tokenizer_from_tiktoken(tiktoken_file())


@pytest.fixture(scope="module")
def oracle() -> Any:
    return encoding(tiktoken_file())


def encoding(data: bytes) -> Any:
    pairs = [line.split() for line in data.splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    special = {name: len(ranks) + index for index, name in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding(
        "test", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_have_tiktokens_ids(tokenizer: FastTokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(ids)


@given(text=st.text(alphabet=SENTENCE + "éß😀\n\t'S", max_size=60))
def test_random_texts_have_tiktokens_ids(tokenizer: FastTokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)


def test_merges_by_result_as_tiktoken_does() -> None:
    """Vocabularies that no training made, where a token can be cut in several ways."""
    draw = random.Random(0)
    for _ in range(20):
        tokens = [bytes([byte]) for byte in range(256)]
        while len(tokens) < 300:
            new = draw.choice(tokens[97:101] + tokens[256:]) + draw.choice(tokens[97:101])
            if new not in tokens and len(new) < 7:
                tokens.append(new)
        lines = [
            base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)
        ]
        ours, theirs = tokenizer_from_tiktoken(b"".join(lines)), encoding(b"".join(lines))
        for _ in range(20):
            text = "".join(draw.choice("abcd") for _ in range(draw.randrange(30)))
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_special_tokens_follow_the_ranks(tokenizer: FastTokenizer, oracle: Any) -> None:
    text = "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert tokenizer.encode(text)[1:] == oracle.encode(text, allowed_special="all")
    assert tokenizer.decode(tokenizer.encode(text)) == "user\n\nhi"
    assert tokenizer.vocab_size == oracle.n_vocab
    assert tokenizer.bos_token_id == oracle.encode_single_token("<|begin_of_text|>")
    ends = [oracle.decode([token_id]) for token_id in tokenizer.eos_token_ids]
    assert ends == ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]


def test_the_names_of_llama_3() -> None:
    """Ids in the 128,256 of Llama 3, as Meta's and Hugging Face's files have them."""
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 256
    places = {name: 128_000 + index for index, name in enumerate(SPECIAL_TOKENS)}
    assert places["<|begin_of_text|>"] == 128_000
    assert places["<|end_of_text|>"] == 128_001
    assert places["<|start_header_id|>"] == 128_006
    assert places["<|end_header_id|>"] == 128_007
    assert places["<|eom_id|>"] == 128_008
    assert places["<|eot_id|>"] == 128_009
    assert places["<|python_tag|>"] == 128_010


def test_only_its_own_content_is_taken_for_it(tmp_path: Path) -> None:
    assert is_tiktoken(tiktoken_file())
    assert is_tiktoken(b"IQ== 0\r\n")
    for other in (sentencepiece_model(), b"", b"\n", b"{}", b"IQ== x\n"):
        assert not is_tiktoken(other)
