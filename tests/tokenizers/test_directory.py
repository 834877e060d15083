"""Tokenizers out of Hugging Face and Meta directories, and what the small files beside them say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import processors

from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.tokenizer import as_tokenizer, load_tokenizer
from jaxpage.tokenizers.default_templates import LLAMA2_TEMPLATE, VICUNA_TEMPLATE
from tests.tokenizers.kinds import (
    byte_level_backend,
    sentencepiece_model,
    tiktoken_file,
    write_files,
)


def fast(directory: Path, **others: Any) -> Any:
    """A directory with a tokenizer.json and other files: dicts as JSON, text as it is."""
    return load_tokenizer(
        write_files(directory, {"tokenizer.json": backend_json(), **said(others)})
    )


def model(directory: Path, **others: Any) -> Any:
    files = {"tokenizer.model": sentencepiece_model(), **said(others)}
    return load_tokenizer(write_files(directory, files))


def said(others: dict[str, Any]) -> dict[str, bytes | str]:
    return {
        name if "." in name else f"{name}.json": text
        if isinstance(text := value, str)
        else json.dumps(value)
        for name, value in others.items()
    }


def backend_json() -> str:
    return byte_level_backend().to_str()


ROLES = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "special": True}}


def test_special_tokens_come_as_text_or_as_objects_from_either_file(tmp_path: Path) -> None:
    tokenizer = fast(tmp_path / "a", tokenizer_config=ROLES)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_end|>", (2, 0))
    older = fast(
        tmp_path / "b", special_tokens_map=ROLES, tokenizer_config={"bos_token": "<|end|>"}
    )
    assert (older.bos_token_id, older.eos_token_ids) == (0, (2, 0))


def test_ends_of_text_are_those_of_all_files(tmp_path: Path) -> None:
    generation = {"eos_token_id": [0, 2]}
    several = fast(tmp_path / "a", tokenizer_config=ROLES, generation_config=generation)
    assert several.eos_token_ids == (0, 2)
    assert several.eos_token == "<|im_end|>"  # templates write the tokenizer's own
    of_model = fast(tmp_path / "b", tokenizer_config=ROLES, config={"eos_token_id": 0})
    assert of_model.eos_token_ids == (0, 2)
    config = {"eos_token_id": [7, -1], "model_type": "llama"}
    both = fast(tmp_path / "c", config=config, generation_config={"eos_token_id": 8})
    assert both.eos_token_ids == (8, 7, 2, 0)  # "<|im_end|>" and "<|end|>" are known to be ends


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_the_flag_for_bos_overrules_the_file(
    tmp_path: Path, in_file: bool, flag: bool | None
) -> None:
    backend = tokenizers.Tokenizer.from_str(backend_json())
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    settings = ROLES | ({} if flag is None else {"add_bos_token": flag})
    files = {"tokenizer.json": backend.to_str(), **said({"tokenizer_config": settings})}
    tokenizer = load_tokenizer(write_files(tmp_path, files))
    adds_bos = in_file if flag is None else flag
    plain = backend.encode("cat", add_special_tokens=False).ids
    assert tokenizer.encode("cat") == [1] * adds_bos + plain
    assert tokenizer.encode("<|im_start|>cat") == [1, *plain]


def test_a_role_makes_a_token_special(tmp_path: Path) -> None:
    tokenizer = fast(tmp_path, tokenizer_config={"eos_token": "cat", "pad_token": "not there"})
    cat = byte_level_backend().token_to_id("cat")
    assert cat in tokenizer.eos_token_ids
    assert tokenizer.decode([cat]) == ""
    size = byte_level_backend().get_vocab_size()
    assert tokenizer.encode("not there") == [size]  # a part that is in no vocabulary
    assert tokenizer.vocab_size == size + 1


def test_padding_and_truncation_in_the_file_are_not_for_prompts(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(backend_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = load_tokenizer(write_files(tmp_path, {"tokenizer.json": backend.to_str()}))
    assert tokenizer.encode("the cat sat on") == byte_level_backend().encode("the cat sat on").ids


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"tokenizer_config": {"chat_template": "inline"}}, "inline"),
        ({"tokenizer_config": {"chat_template": "x"}, "chat_template.jinja": "file"}, "file"),
        ({"chat_template": {"chat_template": "older file"}}, "older file"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
        ),
        ({"tokenizer_config": {"chat_template": {"tool_use": "t", "default": "d"}}}, "d"),
        ({}, None),
        ({"config": {"_name_or_path": "lmsys/vicuna-7b"}}, VICUNA_TEMPLATE),
    ],
)
def test_chat_templates_are_found_where_models_keep_them(
    tmp_path: Path, files: dict[str, Any], wanted: str | None
) -> None:
    assert fast(tmp_path, **files).chat_template == wanted


def test_models_without_a_template_have_one_by_name_or_kind(tmp_path: Path) -> None:
    assert model(tmp_path / "some-llama").chat_template == LLAMA2_TEMPLATE
    assert model(tmp_path / "Vicuna-7B").chat_template == VICUNA_TEMPLATE
    in_cache = tmp_path / "models--lmsys--vicuna-7b" / "snapshots" / "0f3a"
    assert model(in_cache).chat_template == VICUNA_TEMPLATE


def test_model_files_are_told_apart_by_content(tmp_path: Path) -> None:
    three = load_tokenizer(write_files(tmp_path / "3", {"tokenizer.model": tiktoken_file()}))
    two = model(tmp_path / "2")
    assert three.bos_token == "<|begin_of_text|>"
    assert two.bos_token == "<s>"
    assert load_tokenizer(tmp_path / "2" / "tokenizer.model").encode("a") == two.encode("a")


def test_the_json_file_wins_over_the_model(tmp_path: Path) -> None:
    both = {"tokenizer.json": backend_json(), "tokenizer.model": sentencepiece_model()}
    tokenizer = load_tokenizer(write_files(tmp_path, both))
    assert tokenizer.encode("cat") == byte_level_backend().encode("cat").ids


def test_sentencepiece_follows_its_settings(tmp_path: Path) -> None:
    plain = model(tmp_path / "a")
    assert plain.encode("cat")[0] == 1
    assert model(tmp_path / "b", tokenizer_config={"add_bos_token": False}).encode("cat")[0] != 1
    other = model(tmp_path / "c", tokenizer_config={"bos_token": "</s>", "eos_token": "<s>"})
    assert (other.bos_token_id, other.eos_token_ids) == (2, (1,))


def test_added_tokens_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    plain = model(tmp_path / "a")
    size = plain.vocab_size
    older = model(
        tmp_path / "b", added_tokens={"[PAD]": size}, special_tokens_map={"pad_token": "[PAD]"}
    )
    decoder = {str(size): {"content": "<tool>", "special": False}, "1": {"content": "<s>"}}
    newer = model(tmp_path / "c", tokenizer_config={"added_tokens_decoder": decoder})
    assert older.vocab_size == newer.vocab_size == size + 1
    assert older.encode("[PAD]") == newer.encode("<tool>") == [1, size]
    assert (older.decode([size]), newer.decode([size])) == ("", "<tool>")
    assert older.decode([size], skip_special_tokens=False) == "[PAD]"
    plain = model(tmp_path / "d", added_tokens={"[PAD]": size})  # special by no part
    assert plain.decode([size]) == "[PAD]"


def test_the_longest_special_token_is_found(tmp_path: Path) -> None:
    size = model(tmp_path / "a").vocab_size
    tokenizer = model(tmp_path / "b", added_tokens={"</s>!": size, "</s>!?": size + 1})
    assert tokenizer.encode("</s>!?</s>!</s>") == [1, size + 1, size, 2]


def test_the_space_before_a_part_follows_legacy(tmp_path: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    text, (cat, bare) = "cat</s>cat", (library.encode("cat"), library.encode(" cat")[1:])
    assert model(tmp_path / "a").encode(text) == [1, *cat, 2, *cat]
    newer = model(tmp_path / "b", tokenizer_config={"legacy": False})
    ids = newer.encode(text)
    assert ids[: len(cat) + 2] == [1, *cat, 2]
    assert newer.decode(ids) == "catcat"
    assert newer.encode("</s>cat")[:2] == [1, 2]
    assert newer.decode(newer.encode("</s>cat")[2:] + cat) == "cat cat"
    assert bare  # the word has more than one way


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json that can't be read (Cannot"),
        ({"tokenizer.json": "{}"}, "wanted a tokenizer that the tokenizers library reads"),
        ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json"),
        ({"tokenizer.model": b"\x0a\x05junk"}, "tokenizer.model that can't be read"),
        ({"tokenizer.model": b""}, "wanted a whole sentencepiece model"),
        ({"tokenizer.model": b"IQ== 0\nIg==\n"}, "damaged tiktoken"),
        ({"tokenizer.model": b"IQ== 0\nIg== 5\n"}, "ranks are not 0, 1, 2"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "lacks the bytes [0, 1, 2"),
        (
            {"tokenizer.json": backend_json(), "tokenizer_config.json": "{"},
            "tokenizer_config.json that can't be read",
        ),
        (
            {"tokenizer.json": backend_json(), "tokenizer_config.json": "[]"},
            "that holds a list, wanted a JSON object",
        ),
        ({"tokenizer.json": backend_json(), "tokenizer_config.json": "[" * 99999}, "recursion"),
        (
            {"tokenizer.json": backend_json(), "config.json": b"\xff"},
            "config.json that can't be read ('utf-8'",
        ),
        (
            {"tokenizer.json": backend_json(), "chat_template.jinja": b"\xff"},
            "wanted a chat template",
        ),
        (
            {"tokenizer.json": backend_json(), "config.json": '{"eos_token_id": "x"}'},
            "got eos_token_id='x' in",
        ),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, files: dict[str, bytes | str], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(write_files(tmp_path, files))
    assert message in str(caught.value)


def test_what_a_caller_has_becomes_a_tokenizer(tmp_path: Path) -> None:
    ours = model(tmp_path)
    assert as_tokenizer(ours) is ours
    assert as_tokenizer(str(tmp_path)).encode("cat") == ours.encode("cat")
    library = as_tokenizer(byte_level_backend())
    assert library.decode(library.encode("the cat")) == "the cat"

    class Fast:
        """As far as an object of transformers is looked at."""

        backend_tokenizer = byte_level_backend()
        bos_token, bos_token_id, eos_token, eos_token_id = "<|im_start|>", 1, "<|im_end|>", 2
        chat_template = "template"

    theirs = as_tokenizer(Fast())
    assert (theirs.bos_token_id, theirs.eos_token_ids) == (1, (2, 0))
    assert (theirs.eos_token, theirs.chat_template) == ("<|im_end|>", "template")
    with pytest.raises(ConfigError, match="pass the path of the model instead"):
        as_tokenizer(3)
