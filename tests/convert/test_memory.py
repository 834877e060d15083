"""What is free, and the refusal that says need and have."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import memory
from jaxpage.errors import CapacityError

GIB = 2**30


def test_need_and_have_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * GIB)
    memory.require_memory(3 * GIB, "the model")
    with pytest.raises(CapacityError, match=r"the model, which needs 4\.00 GiB, and 3\.00 GiB"):
        memory.require_memory(4 * GIB, "the model")


def test_unknown_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.require_memory(2**60, "the model")


def test_disk(tmp_path: Path) -> None:
    memory.require_disk(1, tmp_path, "x")
    with pytest.raises(CapacityError, match="GiB free in"):
        memory.require_disk(2**60, tmp_path, "x")


def test_meminfo_and_the_container_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   4096 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 4096 * 1024
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    for limit, wanted in (("max\n", 4096 * 1024), ("10000\n", 7500), ("100\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory.available_bytes() == wanted


def test_without_meminfo_sysconf_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    found = memory.available_bytes()
    assert found is None or found > 0
