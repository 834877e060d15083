"""A file or a pipe of prompts as lines of text, and whether each of them is a JSON object.

Bytes become text before anything is made of them: what a file holds shows in its characters, and
shells write UTF-16 and byte order marks. Knows nothing of the fields of a line.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpage.errors import ConfigError, RequestError

MOST_PIPED_BYTES = 256 << 20
"""Most that is read of what has no size, such as a pipe or a device."""
_MARKS = (  # in this order: the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Which of the first four bytes are zero where they spell plain letters; RFC 4627.
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}
_BREAKS = re.compile(r"\r\n|\n|\r")
_DESCRIPTORS = ("/dev/", "/proc/")
"""Where names say nothing of a file: `/dev/stdin` may be any."""
_BLANK = "\ufeff \t\f\v"
"""What a line may hold and still be blank, or have before its brace: marks, spaces."""


class PromptLines(NamedTuple):
    """What a file holds."""

    is_jsonl: bool
    lines: list[str | RequestError]
    """Those that aren't blank; an error stands for one that is no text."""


def read_prompt_lines(name: str) -> PromptLines:
    """The lines of `--prompts NAME`: a `.jsonl` or `.txt` file, or any other, a pipe or `-` for
    standard input; these are JSONL if they begin with a brace.

    Raises ConfigError when it can't be read.
    """
    data, suffix = _read(name)
    encoding, start = _encoding(data)
    decoded = _decoded(data[start:], encoding, name)
    lines = [line for line in decoded if isinstance(line, RequestError) or line.strip(_BLANK)]
    first = next((line for line in lines if isinstance(line, str)), "")
    is_jsonl = suffix == ".jsonl" or (suffix == "" and first.lstrip(_BLANK)[:1] == "{")
    if is_jsonl:  # files that were joined have marks inside
        lines = [line.lstrip(_BLANK) if isinstance(line, str) else line for line in lines]
    return PromptLines(is_jsonl, lines)


def _read(name: str) -> tuple[bytes, str]:
    """The bytes, and ".jsonl", ".txt" or nothing for what only its content tells."""
    if name == "-":
        if sys.stdin is None:
            raise ConfigError("got --prompts - and no standard input, wanted prompts; pipe some in")
        return _read_pipe(sys.stdin.buffer, name), ""
    suffix = Path(name).suffix.lower()
    try:
        with open(name, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if not is_file or name.startswith(_DESCRIPTORS):
                return _read_pipe(file, name), suffix if suffix in (".jsonl", ".txt") else ""
            if suffix in (".jsonl", ".txt"):
                return file.read(), suffix
    except OSError as error:
        raise ConfigError(
            f"got --prompts {name}, which can't be read ({error.strerror}), wanted a file; "
            "check the path"
        ) from None
    raise ConfigError(f"got --prompts {name}, wanted a .txt or .jsonl file, or -; rename it")


def _read_pipe(file: BinaryIO, name: str) -> bytes:
    data = file.read(MOST_PIPED_BYTES + 1)
    if len(data) > MOST_PIPED_BYTES:
        raise ConfigError(
            f"got --prompts {name} with more than {MOST_PIPED_BYTES} bytes and no end, wanted "
            "prompts; give larger ones as a .jsonl file"
        )
    return data


def _encoding(data: bytes) -> tuple[str, int]:
    """The encoding, and where the text begins."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding, len(mark)
    return _ZEROS.get(tuple(byte == 0 for byte in data[:4]), "utf-8"), 0


def _decoded(data: bytes, encoding: str, name: str) -> list[str | RequestError]:
    """UTF-8 is decoded line by line, so that a bad one errs alone."""
    if encoding != "utf-8":
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"got --prompts {name} in {encoding.upper()} with {error.reason} at byte "
                f"{error.start}, wanted whole text; save the file as UTF-8"
            ) from None
        return list(_BREAKS.split(text))
    lines: list[str | RequestError] = []
    for line in data.splitlines():
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"got {error.reason} at byte {error.start}"
            lines.append(RequestError(f"{what}, wanted UTF-8 text; save the file as UTF-8"))
    return lines
