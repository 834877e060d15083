"""The fleet's small version, and the counting twin against hand arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.service import scale
from benchmarks.sim.cost import A10G, GIB, LLAMA_7B, PAPER_SITE, Site, StepCost
from benchmarks.sim.counting import CountingEngine
from benchmarks.sim.lengths import Job
from benchmarks.sim.paged import paged


def test_alone_the_twin_takes_the_steps_of_the_real_scheduler() -> None:
    jobs = [Job(33, 20), Job(5, 7, 3.0), Job(16, 1, 6.0)]
    twin, real = CountingEngine(PAPER_SITE).run(iter(jobs)), paged(PAPER_SITE, jobs)
    assert (twin.steps, twin.output_tokens) == (28, 28)
    assert twin.steps == real.counters["num_steps"] and twin.seconds == pytest.approx(real.end_s)


def test_under_pressure_the_twin_preempts_and_loses_no_token() -> None:
    jobs = [Job(40, 200, 0.01 * i) for i in range(60)]
    small = Site(StepCost(A10G, LLAMA_7B), 0.5 * GIB)  # 1,024 slots
    totals = CountingEngine(small).run(iter(jobs))
    assert totals.preemptions > 0
    assert (totals.requests, totals.output_tokens) == (60, 60 * 200)


@pytest.mark.slow
def test_the_small_version_prints_its_tables_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", "--quick"])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    scale.main()
    assert "replicas at 1,000,000 a day" in capsys.readouterr().out
    assert (tmp_path / "scale_quick.svg").read_text().startswith("<svg")
