"""A helper can leave its caller's processor, and is as free as before; no result can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

SOURCE = Path(__file__).with_name("processors_test.cpp")
COMPILER = shutil.which("c++")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux alone")
def test_a_thread_leaves_its_processor_and_stays_free(tmp_path: Path) -> None:
    if COMPILER is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a C++ compiler and two processors")
    program = tmp_path / "processors"
    headers = Path(__file__).parents[2] / "jaxpage" / "native"
    includes = [f"-I{headers}", "-isystem", jax.ffi.include_dir()]
    subprocess.run([COMPILER, "-std=c++17", *includes, str(SOURCE), "-o", program], check=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True)
    stayed, bound = map(int, out.stdout.split())
    assert bound == 0
    assert stayed < 50, "a thread may be moved back, but seldom"
