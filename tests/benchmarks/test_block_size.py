"""The small block-size sweep, and how memory and kernel are joined."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.speed import block_size
from tests.tiny import MODEL_DIR


def test_the_joined_estimate_weighs_the_kernel_by_its_share() -> None:
    rows = [{"lengths": "a", "block_size": size, "memory_tokens_per_s": 100.0} for size in (1, 16)]
    block_size.weigh(rows, {1: 2.0, 16: 1.0})
    assert rows[1]["joined_share"] == 1.0
    assert rows[0]["joined_share"] == pytest.approx(1 / (1 + block_size.ATTENTION_SHARE))


@pytest.mark.slow
def test_the_small_version_sweeps_both_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["block_size", "--quick", "--model", str(MODEL_DIR)])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    block_size.main()
    record = json.loads((tmp_path / "block_size_quick.json").read_text())
    waste = [row["waste_percent"] for row in record["counted"] if row["lengths"] == "ShareGPT"]
    assert waste == sorted(waste), "larger blocks waste more"
    assert "ShareGPT: best at" in capsys.readouterr().out
