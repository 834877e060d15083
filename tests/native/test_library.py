"""A library that is broken, foreign or refused is left alone, and JAX is as it was."""

from __future__ import annotations

import _ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpage import native
from jaxpage.native.library import CALLS, INTERFACE, require

TRY = """
import logging, sys
import jax.numpy as jnp
from jaxpage.native.library import load
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
for path in sys.argv[1:]:
    assert load(path) is None, path
assert jnp.ones(2).sum() == 2
"""
NEWER = """
#include <stddef.h>
#include "xla/ffi/api/c_api.h"
int jaxpage_interface() { return INTERFACE; }
void* HANDLER(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Metadata_Extension* told = (XLA_FFI_Metadata_Extension*)frame->extension_start;
  told->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  told->metadata->api_version.minor_version = XLA_FFI_API_MINOR + 1;
  told->metadata->traits = 0;
  return NULL;
}
"""
"""Stands for what was built with a newer JAX's headers: its version is all that it tells."""
OLDER = "int jaxpage_interface() { return 5; }"
"""Stands for what was built from older sources, whose calls had other names."""


def tried(*paths: Path) -> list[str]:
    """What the log says of files that are tried in a process of their own: a crash is its alone."""
    words = [sys.executable, "-c", TRY, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [line for line in done.stdout.splitlines() if line.startswith("native kernels in")]


def compiled(source: Path, text: str) -> Path:
    """The shared library of a C program."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source.write_text(text)
    library = source.with_suffix(".so")
    headers = ["-isystem", jax.ffi.include_dir()]
    subprocess.run([compiler, "-shared", "-fPIC", *headers, source, "-o", library], check=True)
    return library


@pytest.mark.slow
def test_what_cannot_be_loaded_is_left_alone(tmp_path: Path) -> None:
    whole = Path(require()._name).read_bytes()
    other_machine = bytearray(whole)
    other_machine[18:20] = b"\xb7\0" if whole[18:20] != b"\xb7\0" else b"\x3e\0"
    of_32_bits = bytearray(whole)
    of_32_bits[4] = 1
    contents = {
        "empty": b"",
        "text": b"#!/bin/sh",
        "header": whole[:40],
        "tenth": whole[: len(whole) // 10],
        "half": whole[: len(whole) // 2],
        "most": whole[:-4096],
        "other machine": other_machine,
        "32 bits": of_32_bits,
        "zeros": bytes(len(whole)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "directory").mkdir()
    paths = [*(tmp_path / name for name in contents), tmp_path / "directory", tmp_path / "absent"]
    paths.append(Path(_ctypes.__file__))  # a library, without our functions
    said = tried(*paths)
    assert len(said) == len(paths)
    assert "cut short" in said[4]
    assert "jaxpage_interface" in said[-1]


@pytest.mark.slow
def test_what_xla_refuses_is_left_alone(tmp_path: Path) -> None:
    body, *handlers = NEWER.replace("INTERFACE", str(INTERFACE)).partition("void* HANDLER")
    calls = ("".join(handlers).replace("HANDLER", f"jaxpage_{name}") for name in CALLS)
    (said,) = tried(compiled(tmp_path / "newer.c", body + "".join(calls)))
    assert "version" in said


@pytest.mark.slow
def test_what_was_built_from_other_sources_is_left_alone(tmp_path: Path) -> None:
    (said,) = tried(compiled(tmp_path / "older.c", OLDER))
    assert f"its interface is 5, wanted {INTERFACE}; build it again" in said


def test_the_notice_is_one_line() -> None:
    assert "\n" not in native.MISSING
