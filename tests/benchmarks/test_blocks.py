"""The block benchmark runs, and says that it found no fault."""

from __future__ import annotations

import sys

import pytest

from benchmarks.checks import blocks


def test_the_quick_run_ends_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blocks", "--quick"])
    blocks.main()
    said = capsys.readouterr().out
    assert "3,000 operations" in said and "no fault" in said
    assert "4,000 tokens, hit:" in said
    for name in ("copies", "swap in", "evicted blocks", "open with a hit", "reset"):
        count = next(line for line in said.splitlines() if line.endswith(f"  {name}"))
        assert int(count.split()[0]) > 0, count
