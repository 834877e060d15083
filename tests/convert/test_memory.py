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
