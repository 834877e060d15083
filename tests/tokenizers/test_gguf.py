"""Tokenizers out of GGUF files: the names of pre-tokenizers, the flags, and damaged files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.errors import CheckpointError
from jaxpage.tokenizer import load_tokenizer, read_gguf_metadata, tokenizer_from_gguf
from jaxpage.tokenizers.default_templates import LLAMA2_TEMPLATE, VICUNA_TEMPLATE
from jaxpage.tokenizers.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from tests.tokenizers.kinds import (
    HARD_TEXTS,
    byte_level_keys,
    sentencepiece_keys,
    write_gguf,
)

NUM_PIECES = len(sentencepiece_keys()["tokens"])


def described(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys as a GGUF file's metadata has them."""
    return {key if "." in key else f"tokenizer.ggml.{key}": keys[key] for key in keys}


def words(name: str, text: str) -> list[str]:
    return [
        text[start:end] for _, (start, end) in pre_tokenizer(name).build().pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("gpt2", "I'll see 2024 :)\n", ["I", "'ll", " see", " 2024", " :)", "\n"]),
        ("smollm", "in 2024 ½", ["in", " ", "2", "0", "2", "4", " ", "½"]),
        ("llama-bpe", "I'LL pay 12345!\n\n", ["I", "'LL", " pay", " ", "123", "45", "!\n\n"]),
        ("qwen2", "x 12\n  y", ["x", " ", "1", "2", "\n", " ", " y"]),
        ("tekken", "camelCase HTTPServer 12", ["camel", "Case", " HTTPServer", " ", "1", "2"]),
        ("deepseek-coder", "if x: 42\n", ["if", " x", ":", " ", "4", "2", "\n"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_each_name_cuts_text_by_its_own_rule(name: str, text: str, wanted: list[str]) -> None:
    assert words(name, text) == wanted


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_cutting_loses_nothing(name: str, text: str) -> None:
    assert "".join(words(name, text)) == text


@given(text=st.text(alphabet="aB日 \n\t'slL12½.!é", max_size=30))
def test_single_patterns_find_what_the_regex_package_finds(text: str) -> None:
    regex = pytest.importorskip("regex", reason="needs regex to compare with")
    for name in ("gpt2", "llama-bpe", "qwen2", "tekken"):
        (pattern,) = pre_tokenizer(name).patterns
        assert words(name, text) == regex.findall(pattern, text)


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"pre='new-kind', wanted one of .*smollm"):
        tokenizer_from_gguf(described(byte_level_keys(pre="new-kind")))


def test_without_a_name_the_default_is_taken_and_said() -> None:
    with pytest.warns(UserWarning, match=r"has no tokenizer\.ggml\.pre"):
        tokenizer = tokenizer_from_gguf(described(byte_level_keys(pre=None)))
    assert tokenizer.decode(tokenizer.encode("the cat 345")) == "the cat 345"


@pytest.mark.parametrize("keys", [byte_level_keys(), sentencepiece_keys()])
def test_tokens_that_pad_the_embedding_are_no_tokens(keys: dict[str, Any]) -> None:
    padded = {**keys, "tokens": [*keys["tokens"], "[PAD1]", "[PAD2]"]}
    padded["token_type"] = [*keys["token_type"], 5, 5]
    if "scores" in keys:
        padded["scores"] = [*keys["scores"], -1e3, -1e3]
    plain, longer = tokenizer_from_gguf(described(keys)), tokenizer_from_gguf(described(padded))
    assert longer.vocab_size == plain.vocab_size == len(keys["tokens"])
    assert longer.encode("[PAD1] cat") == plain.encode("[PAD1] cat")
    assert longer.decode([plain.vocab_size]) == ""


def test_digits_of_smollm_stay_single() -> None:
    tokenizer = tokenizer_from_gguf(described(byte_level_keys()))
    assert tokenizer.encode("345") == [tokenizer.encode(digit)[0] for digit in "345"]


@pytest.mark.parametrize(
    ("changes", "adds_bos"),
    [
        ({"pre": "llama-bpe", "add_bos_token": None}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "smollm", "add_bos_token": None}, False),
        ({"pre": "smollm", "add_bos_token": True}, True),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_follows_the_flag_or_the_pre_tokenizer(changes: dict[str, Any], adds_bos: bool) -> None:
    tokenizer = tokenizer_from_gguf(described(byte_level_keys(**changes)))
    assert tokenizer.encode("") == [1] * adds_bos
    assert tokenizer.info.adds_bos == adds_bos


def test_sentencepiece_flags() -> None:
    plain = tokenizer_from_gguf(described(sentencepiece_keys()))
    without_bos = tokenizer_from_gguf(described(sentencepiece_keys(add_bos_token=False)))
    assert plain.encode("cat") == [1, *without_bos.encode("cat")]
    bare = tokenizer_from_gguf(described(sentencepiece_keys(add_space_prefix=False)))
    assert bare.decode(bare.encode(" cat")) == " cat"
    assert bare.encode(" cat") == plain.encode("cat")


def test_unknown_needs_no_type_of_its_own() -> None:
    keys = sentencepiece_keys()
    keys["token_type"][0] = 1
    assert tokenizer_from_gguf(described(keys)).encode("日 cat") == tokenizer_from_gguf(
        described(sentencepiece_keys())
    ).encode("日 cat")


def test_a_name_decides_the_default_template() -> None:
    def template(**changes: Any) -> str | None:
        return tokenizer_from_gguf(described(sentencepiece_keys(**changes))).chat_template

    assert template() == LLAMA2_TEMPLATE
    assert template(**{"general.name": "Vicuna 7B v1.5"}) == VICUNA_TEMPLATE
    assert template(**{"tokenizer.chat_template": "mine"}) == "mine"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert', wanted 'gpt2'"),
        ({}, "tokenizer.ggml.model that is NoneType, wanted str"),
        (byte_level_keys(tokens=None), "tokenizer.ggml.tokens that is NoneType"),
        (byte_level_keys(token_type=[1, 1]), "got 2 entries in tokenizer.ggml.token_type"),
        (byte_level_keys(merges=["a b", "a"]), "wanted each token once and two a merge"),
        (byte_level_keys(merges=["a zz"]), "got a GGUF file's tokens and merges"),
        (byte_level_keys(tokens=["a"] * len(byte_level_keys()["tokens"])), "are repeated"),
        (byte_level_keys(eos_token_id="2"), "eos_token_id='2' in the GGUF file, wanted a token id"),
        (byte_level_keys(eos_token_id=True), "tokenizer.ggml.eos_token_id=True in"),
        (byte_level_keys(merges=[1, 2]), "a GGUF file with tokenizer.ggml.merges with int in it"),
        (byte_level_keys(tokens=[], token_type=[]), "a GGUF file with no tokens, wanted"),
        (
            sentencepiece_keys(tokens=[1] * NUM_PIECES),
            "a GGUF file with tokenizer.ggml.tokens with int",
        ),
        (sentencepiece_keys(token_type=["x"] * NUM_PIECES), "with str in"),
        (sentencepiece_keys(scores=[float("nan")] * NUM_PIECES), "wanted a score for each token"),
        (
            sentencepiece_keys(tokens=["a"] * NUM_PIECES),
            "got a GGUF file's vocabulary that can't be read",
        ),
        (sentencepiece_keys(scores=[0.5]), "got 1 entries in tokenizer.ggml.scores"),
    ],
)
def test_a_tokenizer_that_is_not_whole_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_gguf(described(keys))
    assert message in str(caught.value)


def every_type(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("uint8", 7), ("int8", -7), ("uint16", 7), ("int16", -7), ("uint32", 7)):
        getattr(writer, f"add_{name}")(f"x.{name}", value)
    writer.add_int32("x.int32", -7)
    writer.add_uint64("x.uint64", 2**60)
    writer.add_int64("x.int64", -(2**60))
    writer.add_float32("x.float32", 0.5)
    writer.add_float64("x.float64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "日")
    writer.add_array("x.strings", ["a", "", "é"])
    writer.add_array("x.numbers", [1, -2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_is_what_was_written(tmp_path: Path) -> None:
    read = read_gguf_metadata(every_type(tmp_path / "a.gguf"))
    assert read == {"general.architecture": "llama"} | {
        f"x.{name}": value
        for name, value in (
            *(("uint8", 7), ("int8", -7), ("uint16", 7), ("int16", -7), ("uint32", 7)),
            *(("int32", -7), ("uint64", 2**60), ("int64", -(2**60)), ("float32", 0.5)),
            *(("float64", 0.1), ("bool", True), ("string", "日")),
            *(("strings", ["a", "", "é"]), ("numbers", [1, -2])),
        )
    }


def test_a_cut_file_is_an_error(tmp_path: Path) -> None:
    whole = every_type(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end = whole.rindex(b"x.numbers") + len(b"x.numbers") + 4 + 4 + 8 + 2 * 4
    for size in range(0, end, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"GGML" + data[4:],
        lambda data: data[:4] + b"\0\0\0\3" + data[8:],  # big-endian
        lambda data: data[:4] + b"\1" + data[5:],  # version 1
        lambda data: data[:16] + b"\xff" * 8 + data[24:],  # as many keys as there are not
        lambda data: data[:24] + b"\xff" * 8 + data[32:],  # a key without end
        lambda data: bytes(range(256)) * 8,
        lambda data: b"",
    ],
)
def test_damage_is_an_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = every_type(tmp_path / "a.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"a\.gguf"):
        load_tokenizer(path)


def test_a_large_vocabulary_is_read_at_once(tmp_path: Path) -> None:
    """The gguf package's reader takes seconds for this; of processor time, as machines are busy."""
    keys = {"tokens": [f"token{i}" for i in range(50_000)], "merges": ["a b"] * 50_000}
    path = write_gguf(tmp_path / "big.gguf", keys)
    began = time.process_time()
    metadata: Mapping[str, Any] = read_gguf_metadata(path)
    assert [len(metadata[f"tokenizer.ggml.{key}"]) for key in keys] == [50_000, 50_000]
    assert time.process_time() - began < 1.5
