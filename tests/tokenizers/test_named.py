"""Tokens that files beside a vocabulary name: they are tokens, and what ends a text is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models

from jaxpage.chat_template import render_chat
from jaxpage.errors import CheckpointError
from jaxpage.tokenizer import load_tokenizer, save_tokenizer, tokenizer_from_gguf
from jaxpage.tokenizers.fast import FastTokenizer
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer
from tests.tokenizers.kinds import (
    byte_level_backend,
    byte_level_keys,
    sentencepiece_keys,
    sentencepiece_model,
    tiktoken_file,
    write_files,
)

VOCABULARIES: dict[str, dict[str, bytes | str]] = {
    "json": {"tokenizer.json": byte_level_backend().to_str()},
    "sentencepiece": {"tokenizer.model": sentencepiece_model()},
    "tiktoken": {"tokenizer.model": tiktoken_file()},
}


def load(directory: Path, vocabulary: str, **said: Any) -> Any:
    files = {f"{name}.json": json.dumps(value) for name, value in said.items()}
    return load_tokenizer(write_files(directory, {**VOCABULARIES[vocabulary], **files}))


def size(directory: Path, vocabulary: str) -> int:
    return load(directory / "plain", vocabulary).vocab_size


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "said",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"NEXT": {"content": "<|new|>"}}}},
        {"added_tokens": {"<|new|>": "NEXT"}},
        {"tokenizer_config": {"additional_special_tokens": ["<|new|>"]}},
        {"tokenizer_config": {"extra_special_tokens": ["<|new|>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|new|>"}}},
        {"tokenizer_config": {"image_token": "<|new|>"}},
        {"tokenizer_config": {"mask_token": "<|new|>"}},
        {"tokenizer_config": {"eos_token": {"content": "<|new|>", "__type": "AddedToken"}}},
        {"special_tokens_map": {"additional_special_tokens": [{"content": "<|new|>"}]}},
        {"special_tokens_map": {"sep_token": "<|new|>"}},
    ],
    ids=str,
)
def test_a_token_named_anywhere_is_one(tmp_path: Path, vocabulary: str, said: Any) -> None:
    new = size(tmp_path, vocabulary)
    text = json.dumps(said).replace('"NEXT":', f'"{new}":').replace('"NEXT"', str(new))
    tokenizer = load(tmp_path / "said", vocabulary, **json.loads(text))
    ids = tokenizer.encode("cat<|new|>cat", add_special_tokens=False)
    assert ids.count(new) == 1
    assert tokenizer.vocab_size == new + 1  # so that it can be fed and drawn
    assert tokenizer.decode([new], skip_special_tokens=False) == "<|new|>"
    assert (new in tokenizer.eos_token_ids) == ("eos_token" in text)
    save_tokenizer(tokenizer, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.encode("cat<|new|>cat", add_special_tokens=False) == ids
    assert saved.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.torch
@pytest.mark.parametrize(
    "said",
    [
        {"additional_special_tokens": ["<|a|>", "cat"], "eos_token": "<|b|>", "pad_token": "<|c|>"},
        {
            "added_tokens_decoder": {
                "N0": {"content": "<|a|>", "lstrip": True, "special": True},
                "N1": {"content": "zoo", "single_word": True},
                "N2": {"content": "<t>", "rstrip": True, "normalized": True},
            },
            "cls_token": "<|b|>",
            "some_token": "<|d|>",
        },
    ],
    ids=str,
)
def test_transformers_has_the_same_tokens(tmp_path: Path, said: dict[str, Any]) -> None:
    import transformers

    first = byte_level_backend().get_vocab_size()
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **said})
    for index in range(3):
        text = text.replace(f"N{index}", str(first + index))
    config = {"chat_template": "{{ pad_token }}{{ cls_token }}{{ some_token }}{{ sep_token }}"}
    ours: Any = load(tmp_path, "json", tokenizer_config=json.loads(text) | config)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    for each in ("a <|a|> b", "cat zoo<t>  zoos zoo", "<|b|><|c|>\n<|d|>", "  <|a|>  <t> cat"):
        ids = ours.encode(each)
        assert ids == theirs.encode(each)
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == wanted
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(messages, ours) == theirs.apply_chat_template(messages, tokenize=False)


def test_flags_beside_a_model_cut_a_text_as_the_tokenizers_library_does(tmp_path: Path) -> None:
    flags = [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {}]
    texts = ["<a>", "<a>b", "on", "\u65e5"]
    first = size(tmp_path, "sentencepiece")
    added = {
        str(first + i): {"content": text, **flag}
        for i, (text, flag) in enumerate(zip(texts, flags, strict=True))
    }
    tokenizer = load(tmp_path, "sentencepiece", tokenizer_config={"added_tokens_decoder": added})
    assert isinstance(tokenizer, SentencePieceTokenizer)
    library, draw = tokenizers.Tokenizer(models.BPE()), random.Random(0)
    library.add_tokens(
        [AddedToken(t, normalized=False, **f) for t, f in zip(texts, flags, strict=True)]
    )
    for _ in range(400):
        parts = [*texts, " ", "  ", "\n", "x", "on", "b", "_", "\u00e9"]
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(12)))
        found = [(token_id - first, span) for token_id, *span in tokenizer._tokens_in(text)]  # pyright: ignore[reportPrivateUsage]  # its places are seen nowhere else
        wanted = library.encode(text)
        assert found == list(zip(wanted.ids, map(list, wanted.offsets), strict=True)), text


def test_an_id_that_the_library_moves_is_warned_of(tmp_path: Path) -> None:
    moved = {"added_tokens_decoder": {"9999": {"content": "<|new|>"}}}
    with pytest.warns(UserWarning, match=r"the id 9999, but with its vocabulary it is \d+, as in"):
        load(tmp_path, "json", tokenizer_config=moved)


def test_a_renamed_reserved_token_of_llama_3_keeps_its_id(tmp_path: Path) -> None:
    plain = load(tmp_path / "a", "tiktoken")
    (reserved,) = plain.encode("<|reserved_special_token_5|>", add_special_tokens=False)
    said = {"added_tokens_decoder": {str(reserved): {"content": "<|tool|>", "special": True}}}
    named = load(tmp_path / "b", "tiktoken", tokenizer_config=said)
    assert named.encode("<|tool|>", add_special_tokens=False) == [reserved]
    assert named.vocab_size == plain.vocab_size


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_token_whose_part_another_file_gives_to_another_is_one(
    tmp_path: Path, vocabulary: str
) -> None:
    config = {"eos_token": "<|a|>", "pad_token": "<|b|>"}
    older = {"eos_token": "<|c|>", "pad_token": "<|d|>"}
    tokenizer = load(tmp_path, vocabulary, tokenizer_config=config, special_tokens_map=older)
    new = size(tmp_path, vocabulary)
    ids = tokenizer.encode("<|a|><|b|><|c|><|d|>", add_special_tokens=False)
    assert ids == [new, new + 1, new + 2, new + 3]
    assert tokenizer.eos_token == "<|a|>"
    assert {new, new + 2} <= set(tokenizer.eos_token_ids)
    save_tokenizer(tokenizer, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.encode("<|a|><|b|><|c|><|d|>", add_special_tokens=False) == ids


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, "json that has it"])
def test_what_plays_a_part_is_special_whatever_its_flag(tmp_path: Path, vocabulary: str) -> None:
    """As transformers has it."""
    kind = vocabulary.split()[0]
    new = size(tmp_path, kind)
    said: dict[str, Any] = {"pad_token": "<|new|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    files = dict(VOCABULARIES[kind])
    if vocabulary == kind:
        said["added_tokens_decoder"] = {str(new): {"content": "<|new|>", "special": False}}
    else:
        backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
        backend.add_tokens([AddedToken("<|new|>", lstrip=True, normalized=False, special=False)])
        files["tokenizer.json"] = backend.to_str()
    tokenizer = load_tokenizer(
        write_files(tmp_path / "said", {**files, "tokenizer_config.json": json.dumps(said)})
    )
    assert tokenizer.encode("the <|new|>", add_special_tokens=False)[-1] == new
    assert tokenizer.decode([new], skip_special_tokens=True) == ""


@pytest.mark.parametrize("said", [{}, {"additional_special_tokens": ["<unk>"]}], ids=str)
def test_control_pieces_stay_special_beside_added_tokens(tmp_path: Path, said: Any) -> None:
    pieces = {"<s>": 1, "</s>": 2, "<unk>": 0}  # as some fine-tunes list them
    tokenizer = load(tmp_path, "sentencepiece", tokenizer_config=said, added_tokens=pieces)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("<s>the</s>")) == "the"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_named_token_without_text_is_none(tmp_path: Path, vocabulary: str) -> None:
    plain = load(tmp_path / "plain", vocabulary)
    config = {"added_tokens_decoder": {"9": {"content": ""}}, "additional_special_tokens": [""]}
    named = load(tmp_path / "said", vocabulary, added_tokens={"": 9}, tokenizer_config=config)
    assert named.vocab_size == plain.vocab_size
    assert named.encode("the cat") == plain.encode("the cat")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token", 5),
        ("eos_token", {"content": 5}),
        ("eos_token", {"content": "x", "lstrip": "yes"}),
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"5": "x"}),
        ("added_tokens_decoder", {"x": {"content": "x"}}),
        ("added_tokens_decoder", {"-1": {"content": "x"}}),
        ("added_tokens_decoder", {str(2**40): {"content": "x"}}),
        ("additional_special_tokens", "x"),
        ("additional_special_tokens", [5]),
        ("extra_special_tokens", 5),
        ("chat_template", 5),
        ("chat_template", [5]),
        ("eos_token", "\ud800"),
    ],
    ids=str,
)
def test_fields_of_another_type_are_refused(
    tmp_path: Path, vocabulary: str, name: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*, wanted"):
        load(tmp_path, vocabulary, tokenizer_config={name: value})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json.*, wanted an id"):
        load(tmp_path / "b", vocabulary, added_tokens={"x": "5"})


def test_what_is_quoted_of_a_file_is_short(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got x+\.\.\.") as refused:
        load(tmp_path, "json", added_tokens={"x" * 10_000: None})
    assert len(str(refused.value)) < 500


def test_user_defined_tokens_of_a_gguf_are_cut_out_first(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    first = len(keys["tokens"])

    def tokenizer(kind: int) -> Any:
        new = {
            "tokens": [*keys["tokens"], "<|x|>"],
            "scores": [*keys["scores"], -1e3],
            "token_type": [*keys["token_type"], kind],
        }
        return tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in (keys | new).items()})

    control, defined = tokenizer(3), tokenizer(4)
    text = "<|x|>cat\nthe<|x|> cat <|x|>"
    assert defined.encode(text) == control.encode(text)
    assert (control.decode([first]), defined.decode([first])) == ("", "<|x|>")
    save_tokenizer(defined, tmp_path)
    saved = load_tokenizer(tmp_path)
    assert isinstance(saved, FastTokenizer)
    assert saved.encode(text) == defined.encode(text)
    assert saved.decode(saved.encode(text)) == defined.decode(defined.encode(text))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("bos", ["a b", "<:>", "$A", "$0:1", " cat", "", "[B]:0"])
def test_any_text_may_begin_a_text(tmp_path: Path, vocabulary: str, bos: str) -> None:
    said = {"bos_token": bos, "add_bos_token": True}
    tokenizer = load(tmp_path, vocabulary, tokenizer_config=said)
    bos_id = tokenizer.bos_token_id
    if bos:
        assert tokenizer.decode([bos_id], skip_special_tokens=False).strip() == bos.strip()
        assert tokenizer.encode("the")[:2].count(bos_id) == 1
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("the cat") == tokenizer.encode("the cat")


def test_marked_spaces_of_a_user_defined_token_are_spaces(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    new = {
        "tokens": [*keys["tokens"], "\u2581\u2581"],
        "scores": [*keys["scores"], 0.0],
        "token_type": [*keys["token_type"], 4],
    }
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in (keys | new).items()})
    ids = tokenizer.encode("a  b")
    assert len(keys["tokens"]) in ids
    assert tokenizer.decode(ids) == "a  b"


@pytest.mark.parametrize("name", ["eot_token_id", "eom_token_id"])
def test_ends_of_a_gguf(name: str) -> None:
    keys = {f"tokenizer.ggml.{k}": v for k, v in byte_level_keys(**{name: 300}).items()}
    assert tokenizer_from_gguf(keys).eos_token_ids == (2, 300, 0)  # 0 is "<|end|>"


def test_an_end_that_is_no_special_token_ends_nothing(tmp_path: Path) -> None:
    plain = tokenizers.Tokenizer(models.BPE({"<|im_end|>": 0, "a": 1}, []))
    assert (
        load_tokenizer(write_files(tmp_path, {"tokenizer.json": plain.to_str()})).eos_token_ids
        == ()
    )


@pytest.mark.parametrize(
    "ids",
    [{"padding_token_id": 32_000}, {"padding_token_id": 2**32 - 1}, {"unknown_token_id": 32_000},
     {"bos_token_id": 10**6}, {"eos_token_id": 10**6}],
    ids=str,
)  # fmt: skip
def test_special_ids_of_a_gguf_that_are_out_of_range_are_repaired(ids: dict[str, Any]) -> None:
    keys = {f"tokenizer.ggml.{k}": v for k, v in sentencepiece_keys(**ids).items()}
    with pytest.warns(
        UserWarning, match=rf"{next(iter(ids))}=\d+ in the GGUF file beside \d+ tokens"
    ):
        tokenizer = tokenizer_from_gguf(keys)
    assert tokenizer.encode("cat")[0] == 1
    assert 2 in tokenizer.eos_token_ids


def test_a_gguf_that_says_no_ids_has_those_of_its_kind() -> None:
    none: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    keys = sentencepiece_keys(**none)
    bare = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    assert (bare.bos_token_id, bare.eos_token_ids, bare.encode("")) == (1, (2,), [1])


@pytest.mark.parametrize("make", [sentencepiece_keys, byte_level_keys])
@pytest.mark.parametrize("place", [7, -1])
def test_a_token_without_text_is_left_alone(make: Any, place: int) -> None:
    keys = make()
    place = place if "scores" not in keys or place < 0 else 300
    whole = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    keys["tokens"] = [*keys["tokens"], "<last>"]
    keys["tokens"][place] = ""
    keys["token_type"] = [*keys["token_type"], 1]
    if "scores" in keys:
        keys["scores"] = [*keys["scores"], -1e3]
    if "merges" in keys:  # of the tokens that are left
        keys["merges"] = []
    with pytest.warns(UserWarning, match="1 tokens without text"):
        tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    assert tokenizer.vocab_size == whole.vocab_size + 1
    if place == -1 and "scores" in keys:
        assert tokenizer.encode("the cat") == whole.encode("the cat")
