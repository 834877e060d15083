"""What a tokenizer's file could make a library do without end, and what makes one panic."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxpage.errors import CheckpointError, RequestError
from jaxpage.tokenizer import as_tokenizer, load_tokenizer, read_gguf_metadata
from tests.fuzz.target import Target
from tests.fuzz.targets_tokenizers import TARGETS, byte_fallback_json
from tests.tokenizers.kinds import byte_level_backend, write_files

Change = Callable[[dict[str, Any]], None]


def changed(change: Change) -> str:
    state = json.loads(byte_fallback_json(metaspace=False))
    change(state)
    return json.dumps(state)


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def replacing(old: str, new: str) -> dict[str, Any]:
    return step("Replace", pattern={"String": old}, content=new)


def split(pattern: str) -> dict[str, Any]:
    return step("Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return step("Sequence", normalizers=list(steps))


BYTES = step("ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=False)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", sequence(*[replacing("a", "aa")] * 40)),
        ("normalizer", sequence(*[replacing("", "xx")] * 9)),
        ("normalizer", sequence(*[step("Prepend", prepend="x" * 99)] * 5)),
        ("normalizer", sequence(*[step("ByteLevel")] * 40)),
        ("normalizer", sequence(sequence(*[replacing("a", "b" * 99)] * 2))),
        ("pre_tokenizer", step("Sequence", pretokenizers=[BYTES] * 40)),
        ("pre_tokenizer", split(r"(\w|\w)*!")),
        ("pre_tokenizer", split("(a|a|aa)*b")),
    ],
)
def test_steps_without_bound_are_refused_in_time(tmp_path: Path, part: str, value: Any) -> None:
    text = changed(lambda state: state.update({part: value}))
    began = time.thread_time()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json with (\d+ )?steps that"):
        load_tokenizer(write_files(tmp_path, {"tokenizer.json": text}))
    assert time.thread_time() - began < 10


A, S = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}


@pytest.mark.parametrize("single", [[A] * 9, [A] + [S] * 999])
def test_a_text_is_not_repeated(tmp_path: Path, single: list[Any]) -> None:
    text = changed(lambda state: state["post_processor"].update(single=single))
    with pytest.raises(CheckpointError, match="a post-processor that repeats"):
        load_tokenizer(write_files(tmp_path, {"tokenizer.json": text}))


def test_padding_and_truncation_of_any_size_are_let_go(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 2**62}, "direction": "Right", "pad_to_multiple_of": 2**62}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
    text = changed(lambda state: state.update(padding=padding, truncation=truncation))
    tokenizer = load_tokenizer(write_files(tmp_path, {"tokenizer.json": text}))
    assert len(tokenizer.encode("the cat")) > 3


def test_a_panic_at_load_is_a_checkpoint_error(tmp_path: Path) -> None:
    text = changed(lambda state: state["model"].update(continuing_subword_prefix="###########"))
    with pytest.raises(CheckpointError, match="PanicException"):
        load_tokenizer(write_files(tmp_path, {"tokenizer.json": text}))


def test_a_panic_at_encode_is_that_requests_error() -> None:
    backend = byte_level_backend()
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    expression = tokenizers.Regex("(a+)+$")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(expression, "isolated")
    tokenizer = as_tokenizer(backend)
    with pytest.raises(RequestError, match="PanicException"):
        tokenizer.encode("a" * 60 + "b")
    assert tokenizer.decode(tokenizer.encode("cat")) == "cat"


def gguf(path: Path, *keys: tuple[str, int, bytes]) -> Path:
    """A GGUF file of keys, types and values as they stand in the file."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys))
    for name, kind, value in keys:
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    path.write_bytes(head)
    return path


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [(0, 1), (8, 8)], ids=["numbers", "texts"])
def test_values_by_the_million_are_passed_over_and_refused_where_asked_for(
    kind: int, width: int, tmp_path: Path
) -> None:
    count = 5_000_000
    path = gguf(
        tmp_path / "a.gguf",
        ("x.many", 9, array(kind, count, bytes(width * count))),
        ("x.after", 4, struct.pack("<I", 7)),
    )
    metadata = read_gguf_metadata(path)
    assert list(metadata) == ["x.many", "x.after"] and metadata["x.after"] == 7
    with pytest.raises(CheckpointError, match=r"got 5000000 entries of x\.many in .*a\.gguf"):
        metadata["x.many"]


def test_a_description_that_is_no_utf8_is_repaired(tmp_path: Path) -> None:
    text = struct.pack("<Q", 3) + b"a\xffb"
    path = gguf(tmp_path / "a.gguf", ("general.description", 8, text))
    with pytest.warns(UserWarning, match=r"general\.description in .* isn't UTF-8"):
        assert read_gguf_metadata(path) == {"general.description": "a\ufffdb"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whole_files_are_used_to_the_end(target: Target, tmp_path: Path) -> None:
    target.read(target.write(tmp_path))
    assert all((tmp_path / name).is_file() for name in target.mutated)
