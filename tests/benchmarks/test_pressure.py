"""The small versions of what happens under load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.service import day, pressure
from tests.tiny import MODEL_DIR


def test_the_waves_have_the_mean_rate_and_come_in_order() -> None:
    jobs = day.waves([(4, 3)], 50.0, 100.0)
    times = [job.arrival_s for job in jobs]
    assert times == sorted(times) and times[-1] < 100.0
    assert len(jobs) == pytest.approx(5000, rel=0.05)


def test_goodput_past_capacity_is_judged() -> None:
    rows = [{"load": 1.0, "goodput_tokens_per_s": 100.0}]
    good = [*rows, {"load": 1.5, "goodput_tokens_per_s": 95.0}]
    bad = [*rows, {"load": 1.5, "goodput_tokens_per_s": 80.0}]
    assert "no collapse" in pressure.verdict("x", good)
    assert "COLLAPSE" in pressure.verdict("x", bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pressure", "day"])
def test_the_small_version_runs_the_engine_and_loses_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--model", str(MODEL_DIR)])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    {"pressure": pressure, "day": day}[name].main()
    assert "wrote" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / f"{name}_quick.svg").exists()
