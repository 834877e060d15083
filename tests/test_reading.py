"""The door to strangers' files: every failure behind it is one kind of error, none waits."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from jaxpage.errors import CapacityError, CheckpointError, RequestError
from jaxpage.reading import answering, read_bytes, read_json, read_text, reading, reason


class Panic(BaseException):
    """As Rust libraries raise: no Exception."""


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        IndexError(),
        struct.error("short"),
        OverflowError(),
        MemoryError(),
        RecursionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        OSError(36, "File name too long"),
        Panic("index out of bounds"),
        ValueError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_failure_names_the_file_and_what_was_wanted(error: BaseException) -> None:
    with (
        pytest.raises(CheckpointError, match=r"^got a\.bin that can't be read \(.+\), wanted ice"),
        reading("a.bin", "ice"),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), CapacityError("full"), UserWarning()]
)
def test_what_is_no_fault_of_the_file_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("a.bin", "ice"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [Panic("index"), RecursionError(), AssertionError("no")])
def test_what_a_request_asks_for_fails_with_the_request(error: BaseException) -> None:
    with (
        pytest.raises(RequestError, match=r"^got a text \(.+\), wanted words; write some$"),
        answering("a text", wanted="words", do="write some"),
    ):
        raise error
    with pytest.raises(KeyboardInterrupt), answering("a text", wanted="words", do="write some"):
        raise KeyboardInterrupt


def test_the_reason_is_one_short_line() -> None:
    assert reason(ValueError("one\ntwo" * 100)) == "one"
    assert reason(KeyError("shape")) == "KeyError: 'shape'"
    assert reason(MemoryError()) == "MemoryError"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_json(tmp_path / "config.json")


def test_an_endless_device_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no regular file"):
        read_bytes(Path("/dev/zero"), wanted="a file")


@pytest.mark.parametrize("size", [1 << 40, 17 << 20])
def test_a_size_is_checked_before_anything_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(size)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match=f"{size} bytes"):
        read_json(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"{", "Expecting"), (b"\xff", "utf-8"), (b"[1]", "a list"), (b"[" * 100_000, "recursion")],
)
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_json(path)


def test_what_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path, tmp_path / ("n" * 300)):
        with pytest.raises(CheckpointError, match=r"got .*wanted text"):
            read_text(path, wanted="text")
