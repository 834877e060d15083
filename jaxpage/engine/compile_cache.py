"""JAX's persistent compilation cache, on by default in the user's cache directory.

JAX writes an entry in place and never again: an entry that a full disk or a kill cut short would
cost a warning and a compilation at every start. So entries that are new since the last start are
read through, and removed if cut short. Without a place to write to there is no cache, and one line
says so.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import zlib
from functools import cache
from pathlib import Path

import jax

from jaxpage.errors import CheckpointError
from jaxpage.reading import read_json

logger = logging.getLogger(__name__)

NEVER_S = 1e9
"""No compilation takes as long: nothing is written."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 20
Seen = dict[str, list[int]]
"""Size and time of each entry that was read through."""


def enable() -> None:
    """Keeps compiled programs on disk, unless the caller has chosen a directory of their own."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        directory = _cache_home() / "jaxpage" / "xla"
        directory.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(directory, os.W_OK | os.X_OK)
        if is_writable:
            remove_torn(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _say(f"compiled programs are not kept: no cache directory ({error}); set XDG_CACHE_HOME")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    least_s = 0.2 if is_writable else NEVER_S
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)


def remove_torn(directory: Path) -> int:
    """Removes the entries that were cut short while written; returns how many."""
    record = directory.with_name(f"{directory.name}-checked.json")
    known, seen, torn = _read(record), {}, 0
    for entry in directory.glob("*-cache"):
        status = entry.lstat()
        if not stat.S_ISREG(status.st_mode):
            continue
        mark = [status.st_size, status.st_mtime_ns]
        if known.get(entry.name) == mark or _is_whole(entry):
            seen[entry.name] = mark
        else:
            entry.unlink(missing_ok=True)
            torn += 1
    if seen != known:
        aside = record.with_name(f"{record.name}.{os.getpid()}")
        aside.write_text(json.dumps(seen), encoding="utf-8")
        aside.replace(record)
    return torn


def _cache_home() -> Path:
    """As the XDG base directory specification says: a relative path counts for nothing."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def _read(record: Path) -> Seen:
    try:
        return read_json(record)
    except CheckpointError:
        return {}


def _is_whole(path: Path) -> bool:
    """Whether a compressed entry ends where it should; True for a format that is not known here."""
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if start == _ZSTD:
            return _is_whole_zstd(file.read())
        if len(start) == 4 and start[:1] != b"\x78":
            return True
        stream = zlib.decompressobj()
        try:
            while chunk := file.read(_CHUNK_BYTES):
                stream.decompress(chunk)
        except zlib.error:
            return False
        return stream.eof


def _is_whole_zstd(data: bytes) -> bool:
    """Walks the blocks of one frame (RFC 8878, 3.1.1); their content is not read."""
    if len(data) < 6:
        return False
    descriptor = data[4]
    has_one_segment = descriptor >> 5 & 1
    size_bytes = (has_one_segment, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - has_one_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
    is_last = False
    while not is_last:
        if at + 3 > len(data):
            return False
        header = int.from_bytes(data[at : at + 3], "little")
        is_last = bool(header & 1)
        at += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
    return at + (4 if descriptor >> 2 & 1 else 0) <= len(data)


@cache
def _say(message: str) -> None:
    """Logs a warning, each message once."""
    logger.warning(message)
