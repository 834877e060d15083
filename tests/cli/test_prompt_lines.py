"""Prompt files as shells and editors write them: marks, encodings, pipes, devices."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpage.cli.jobs import jobs_from_file
from jaxpage.cli.prompt_lines import MOST_PIPED_BYTES, read_prompt_lines
from jaxpage.errors import ConfigError

JSONL = '{"prompt": "hi"}\n{"prompt": "\u00e9\u2028o"}\n'
TEXT = "Hi {there}\n\n  \n\u00e9\u2028o\u3000\r\nyo\rlast"
ENCODINGS = {
    "plain": str.encode,
    "mark": lambda text: text.encode("utf-8-sig"),
    "two marks": lambda text: ("\ufeff" + text).encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "utf-16 big": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "utf-16 without a mark": lambda text: text.encode("utf-16-le"),
    "utf-32": lambda text: text.encode("utf-32"),
}


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("before", ["", " ", "\n \t"])
def test_objects_are_found_however_they_are_written(
    encode: Callable[[str], bytes], before: str, piped: Callable[[bytes], None]
) -> None:
    piped(encode(before + JSONL))
    jobs = jobs_from_file("-", {"temperature": 0.0}, chat=False, system=None)
    assert [(job.prompt, job.error) for job in jobs] == [("hi", None), ("\u00e9\u2028o", None)]


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "two marks"])
def test_text_is_the_same_lines_however_it_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(ENCODINGS[name](TEXT))
    wanted = ["Hi {there}", "\u00e9\u2028o\u3000", "yo", "last"]
    assert read_prompt_lines(str(path)) == (False, wanted)


@pytest.mark.parametrize("data", [JSONL.encode(), b"yo"])
def test_a_file_that_a_descriptor_names_tells_itself_apart(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "any.name").write_bytes(data)
    with open(tmp_path / "any.name", "rb") as file:
        found = read_prompt_lines(f"/dev/fd/{file.fileno()}")
    assert found.is_jsonl == (data != b"yo")
    assert len(found.lines) == len(data.splitlines())


def test_joined_files_have_marks_inside(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(2 * JSONL.encode("utf-8-sig"))
    jobs = jobs_from_file(str(path), {}, chat=False, system=None)
    assert [job.prompt for job in jobs] == ["hi", "\u00e9\u2028o"] * 2


@pytest.mark.parametrize(("name", "is_jsonl"), [("A.JSONL", True), ("A.Txt", False)])
def test_a_name_may_be_in_capitals(tmp_path: Path, name: str, is_jsonl: bool) -> None:
    (tmp_path / name).write_bytes(b'{"prompt": "hi"}')
    assert read_prompt_lines(str(tmp_path / name)) == (is_jsonl, ['{"prompt": "hi"}'])


@pytest.mark.parametrize(
    ("name", "data", "is_jsonl"),
    [
        ("63", JSONL.encode(), True),
        ("63", b"yo", False),
        ("fifo.txt", b"{", False),
        ("fifo.JSONL", b"yo", True),
    ],
)
def test_a_pipe_with_a_name_is_read_as_standard_input(
    tmp_path: Path, name: str, data: bytes, is_jsonl: bool
) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    found = read_prompt_lines(str(path))
    writer.join()
    assert found == (is_jsonl, data.decode().rstrip("\n").split("\n"))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("hi\nyo\n".encode("utf-16")[:-1], "UTF-16-LE with truncated data"),
        (b"\xff\xfe\x00\xd8\x0a\x00", "UTF-16-LE with illegal"),
    ],
)
def test_text_that_is_not_whole_is_refused(
    data: bytes, complaint: str, piped: Callable[[bytes], None]
) -> None:
    piped(data)
    with pytest.raises(ConfigError, match=complaint):
        read_prompt_lines("-")


def test_what_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpage.cli.prompt_lines.MOST_PIPED_BYTES", 1000)
    assert MOST_PIPED_BYTES > 1000
    with pytest.raises(ConfigError, match="more than 1000 bytes and no end"):
        read_prompt_lines("/dev/zero")


@pytest.mark.parametrize("name", [".", "prompts.csv", "/dev/null/x.txt", "a" * 300 + ".txt"])
def test_what_is_no_file_of_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.csv").write_text("hi")
    with pytest.raises(ConfigError, match=r"^got --prompts .*wanted a"):
        read_prompt_lines(name)
