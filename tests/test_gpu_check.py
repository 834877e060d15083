"""The script for the day there is a card runs end to end without one, so that it can't rot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check


def test_the_quick_version_verifies_times_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick"])
    monkeypatch.setattr("benchmarks.report.OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    assert gpu_check.main() == 0
    assert "WRONG" not in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu_check_quick.json").read_text())
    assert all(row["ok"] for row in record["verified"])
    assert 0 < record["step"]["error"] < 1e-5
    assert all(row["us"] > 0 for row in record["decode"] + record["prefill"])
    assert (tmp_path / "gpu_check_quick.svg").read_text().startswith("<svg")


def test_a_wrong_kernel_ends_with_status_1_untimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [{"case": "decode", "error": 1.0, "tolerance": 1e-2, "ok": False}]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick"])
    monkeypatch.setattr("benchmarks.report.OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "verify_kernels", lambda sizes: wrong)
    monkeypatch.setattr(gpu_check, "_step", lambda sizes: {"skipped": "not now"})
    assert gpu_check.main() == 1
    assert "WRONG" in capsys.readouterr().out
    assert "decode" not in json.loads((tmp_path / "gpu_check_quick.json").read_text())
