"""The cache of compiled programs: entries cut short go, and no place for it is no error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxpage.engine import compile_cache

WHOLE = zlib.compress(os.urandom(5000))
# One frame of zstd: a raw block and a repeated one, with the size of the content.
ZSTD = b"\x28\xb5\x2f\xfd\x20\x08" + (3 << 3).to_bytes(3, "little") + b"abc"
ZSTD += (5 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"z"


@pytest.fixture(autouse=True)
def _no_directory_chosen() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache._say.cache_clear()
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        (WHOLE, True),
        (ZSTD, True),
        (b"a format of a later version", True),
        (WHOLE[:-1], False),
        (WHOLE[: len(WHOLE) // 2], False),
        (WHOLE[:1], False),
        (b"", False),
        (ZSTD[:-1], False),
        (ZSTD[:8], False),
        (ZSTD[:4], False),
        (WHOLE[:2500] + b"\0" * 2500, False),
    ],
    ids=repr,
)
def test_an_entry_cut_short_is_removed(tmp_path: Path, content: bytes, stays: bool) -> None:
    directory = tmp_path / "xla"
    directory.mkdir()
    entry, other = directory / "jit_f-0-cache", directory / "notes.txt"
    entry.write_bytes(content)
    other.write_bytes(b"")
    assert compile_cache.remove_torn(directory) == (not stays)
    assert entry.exists() == stays and other.exists()


def test_only_what_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "xla"
    directory.mkdir()
    for name in "ab":
        (directory / f"{name}-cache").write_bytes(WHOLE)
    compile_cache.remove_torn(directory)
    read: list[str] = []
    is_whole = compile_cache._is_whole
    monkeypatch.setattr(compile_cache, "_is_whole", lambda p: read.append(p.name) or is_whole(p))
    (directory / "b-cache").write_bytes(WHOLE[:-1])
    assert compile_cache.remove_torn(directory) == 1 and read == ["b-cache"]
    (tmp_path / "xla-checked.json").write_text("[")  # rubbish is as good as nothing
    assert compile_cache.remove_torn(directory) == 0 and read == ["b-cache", "a-cache"]


@pytest.mark.slow
def test_jax_reads_the_format_that_is_checked(tmp_path: Path) -> None:
    """What JAX writes is whole to us, and cut short it is not."""
    code = (
        "import jax; from jaxpage.engine import compile_cache; compile_cache.enable();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0);"
        "jax.jit(lambda x: x + 1)(jax.numpy.ones(3))"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    directory = tmp_path / "jaxpage" / "xla"

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stderr

    run()
    entries = list(directory.glob("*-cache"))
    assert entries and compile_cache.remove_torn(directory) == 0
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-7])
    assert "Error reading" not in run(), "the torn entries are gone before JAX sees them"
    assert compile_cache.remove_torn(directory) == 0 and list(directory.glob("*-cache"))


@pytest.mark.parametrize("chosen", ["", "relative/cache"])
def test_no_absolute_cache_home_means_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    monkeypatch.setenv("HOME", str(tmp_path))
    compile_cache.enable()
    wanted = tmp_path / ".cache" / "jaxpage" / "xla"
    assert jax.config.values["jax_compilation_cache_dir"] == str(wanted)


def test_no_home_is_no_error_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(nobody))
    with caplog.at_level(logging.WARNING):
        compile_cache.enable()
        compile_cache.enable()
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert [record.message for record in caplog.records] == [
        "compiled programs are not kept: no cache directory (Could not determine home directory.); "
        "set XDG_CACHE_HOME"
    ]


def test_a_file_in_the_place_of_the_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compile_cache.enable()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_directory_that_only_reads_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compile_cache.enable()
    least_s = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    assert least_s == compile_cache.NEVER_S
