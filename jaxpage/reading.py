"""The one way to read a model's files: whatever goes wrong is a CheckpointError.

Files are untrusted, and the libraries that read them raise errors of any kind for a damaged one.
So only this file catches every exception, and no reader opens a file by itself.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxpage.errors import CheckpointError, JaxpageError, RequestError

MOST_JSON_BYTES = 16 << 20
"""Of JSON, which may take twenty times its size in memory; the largest known, an index, has 10 MB.
"""
MOST_SETTINGS_BYTES = 4 << 20
"""Of a model's settings, which have a few kilobytes."""
MOST_TOKENIZER_BYTES = 512 << 20
"""Most of a tokenizer's file; the largest known has 35 MB."""
_PASSING = (JaxpageError, KeyboardInterrupt, SystemExit, GeneratorExit, Warning)
"""What is no fault of a file; a warning is raised where its caller made errors of them."""


@contextmanager
def reading(source: str | Path, wanted: str) -> Iterator[None]:
    """Turns whatever the block raises into a CheckpointError: `got SOURCE ..., wanted WANTED`.

    Errors of this package pass unchanged, and so do interrupts. Rust libraries panic with a
    BaseException; running out of memory counts too, because the sizes come from the file.
    """
    try:
        yield
    except _PASSING:
        raise
    except BaseException as error:
        raise CheckpointError(
            f"got {source} that can't be read ({reason(error)}), wanted {wanted}; "
            "download or convert it again"
        ) from error


@contextmanager
def answering(got: str, *, wanted: str, do: str) -> Iterator[None]:
    """As `reading`, for one request: what the block raises is a RequestError, `got GOT (reason)`.

    A model's template and its tokenizer are untrusted too, and run at each request.
    """
    try:
        yield
    except _PASSING:
        raise
    except BaseException as error:
        raise RequestError(f"got {got} ({reason(error)}), wanted {wanted}; {do}") from error


def reason(error: BaseException) -> str:
    """The message of an error of any library, cut to one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, struct.error):
        return "it ends too early"
    lines = str(error).strip().splitlines()
    text = lines[0][:200] if lines else ""
    known = isinstance(error, ValueError | RuntimeError) or type(error) is Exception
    return text if text and known else ": ".join(filter(None, (type(error).__name__, text)))


@contextmanager
def open_file(path: Path, *, wanted: str) -> Iterator[BinaryIO]:
    """Opens a regular file only: reading a pipe could wait, and a device could be endless."""
    with reading(path, wanted), open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"got {path} that is no regular file, wanted {wanted}; copy it")
        yield file


def read_bytes(path: Path, *, wanted: str, most: int = MOST_TOKENIZER_BYTES) -> bytes:
    """A regular file's content, of at most `most` bytes."""
    with open_file(path, wanted=wanted) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(
                f"got {path} of {size} bytes, wanted {wanted} of at most {most}; download it again"
            )
        return file.read()


def read_text(path: Path, *, wanted: str, most: int = MOST_JSON_BYTES) -> str:
    """A file's text; CheckpointError where it is no UTF-8."""
    with reading(path, wanted):
        return read_bytes(path, wanted=wanted, most=most).decode("utf-8")


def read_json(path: Path, *, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is missing, not JSON or not an object."""
    wanted = "a JSON object"
    with reading(path, wanted):
        value = json.loads(read_text(path, wanted=wanted, most=most))
    if not isinstance(value, dict):
        raise CheckpointError(
            f"got {path} that holds a {type(value).__name__}, wanted {wanted}; download it again"
        )
    return value


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
