"""The simulations: the rivals' books, and the small version of the paper's rows."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.svg import LEFT, RIGHT, TOP, WIDTH, Axes, Series, bar_chart, line_chart
from benchmarks.paper import __main__ as paper
from benchmarks.paper import rates, sharing
from benchmarks.paper.verdict import Effort, Row, judged
from benchmarks.sim import lengths
from benchmarks.sim.buddy import Buddy, chunk_of
from benchmarks.sim.cost import A10G, GIB, LLAMA_7B, PAPER_SITE, Site, StepCost, as_printed
from benchmarks.sim.counting import CountingEngine
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import paged
from benchmarks.sim.policies import faster, orca, tgi, transformers

JOBS = [lengths.Job(20 + i, 5 + i % 7, arrival_s=0.01 * i) for i in range(40)]


def test_a_buddy_gives_no_slot_twice_and_gets_all_back() -> None:
    buddy, rng = Buddy(15728), random.Random(0)
    held: list[tuple[int, int]] = []
    for _ in range(600):
        chunk = buddy.try_take(rng.randint(1, 900))
        if chunk is None or rng.random() < 0.4:
            for each in [chunk] if chunk else []:
                buddy.give_back(*each)
            while held and rng.random() < 0.7:
                buddy.give_back(*held.pop(rng.randrange(len(held))))
        else:
            held.append(chunk)
            taken = sorted(held)
            ends = [start + size for start, size in taken]
            assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
            assert sum(size for _, size in held) + buddy.num_free == 15728
    for chunk in held:
        buddy.give_back(*chunk)
    assert sum(buddy.try_take(2048) is not None for _ in range(10)) == 7
    assert chunk_of(1) == 1 and chunk_of(33) == 64


@pytest.mark.parametrize("run", [
    lambda: orca(PAPER_SITE, JOBS, "max"), lambda: orca(PAPER_SITE, JOBS, "oracle"),
    lambda: tgi(PAPER_SITE, JOBS), lambda: faster(PAPER_SITE, JOBS),
    lambda: transformers(PAPER_SITE, JOBS), lambda: paged(PAPER_SITE, JOBS),
])  # fmt: skip
def test_every_policy_ends_every_job_after_its_arrival(run: Callable[[], Outcome]) -> None:
    outcome = run()
    assert outcome.num_done == len(JOBS)
    for job, first, done in zip(JOBS, outcome.first_s, outcome.finish_s, strict=True):
        assert first is not None and done is not None
        assert job.arrival_s < first <= done <= outcome.end_s
    assert outcome.output_tokens == sum(job.output for job in JOBS)


def test_samples_share_their_prompt_and_no_more_also_after_they_gave_way() -> None:
    jobs = [lengths.Job(17, 100, samples=2) for _ in range(40)]  # one full block of prompt
    small = Site(StepCost(A10G, LLAMA_7B), 0.5 * GIB)  # 1,024 slots
    outcome = paged(small, jobs)
    assert outcome.counters["preemptions_recompute"] > 0
    groups = outcome.meter.sums["batch"] / 2
    assert 0.9 * groups < outcome.meter.sums["saved"] < 1.1 * groups


def test_a_saturated_trace_has_the_means_of_its_source() -> None:
    pairs = lengths.sharegpt()
    for count in (50, 400, 6000):
        found = lengths.mean_of_jobs(lengths.at_once(pairs, count))
        assert found[1] == pytest.approx(lengths.mean_lengths(pairs)[1], rel=0.05)
    anew = lengths.paired_anew(pairs)
    assert sorted(p for p, _ in anew) == sorted(p for p, _ in pairs) and anew != pairs


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "rate", "batch"), [
    (lengths.sharegpt_at_means(), 2.0, 30.42), (lengths.alpaca_like(5000), 30.0, 132.44),
])  # fmt: skip
def test_the_fitted_steps_give_the_printed_batches(
    pairs: list[tuple[int, int]], rate: float, batch: float
) -> None:
    jobs = lengths.poisson(pairs, rate, 12_000 / rate)
    found = CountingEngine(as_printed(PAPER_SITE)).run(iter(jobs)).mean_batch
    assert found == pytest.approx(batch, rel=0.08)
    assert CountingEngine(PAPER_SITE).run(iter(jobs)).mean_batch < 0.7 * batch


def test_beams_are_read_from_their_own_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("benchmarks.common.report.OUT", "benchmarks.common.report.RESULTS"):
        monkeypatch.setattr(folder, tmp_path)
    assert sharing.beams(Effort.quick()) == []
    cell = {"dataset": "Alpaca", "lengths": "Alpaca-like", "width": 4, "saved_percent": 40.0,
            "saved_at_peak_percent": 50.0, "mean_lengths": [20, 58]}  # fmt: skip
    (tmp_path / "paper_beams.json").write_text(json.dumps({"beams": [cell]}))
    (row,) = sharing.beams(Effort.quick())
    assert (row.printed, row.ours) == ("53.13", 40.0)
    assert row.verdict == "outside; within with the peaks in place of the mean (50)"


def test_a_reason_is_what_was_tried_and_brought_a_row_inside() -> None:
    row = Row("1", "x", "10", 14.0, (10.0, 10.0), 0.25, False, (1, 1))
    assert judged(row, {}).verdict == "outside, not explained"
    mended = judged(row, {"half": lambda: 7.0, "less": lambda: 11.0})
    assert mended.verdict == "outside; within with less (11)"
    assert [line[-1] for line in mended.tried_cells()] == ["outside, -30%", "within"]
    assert "not explained; nearest with half" in judged(row, {"half": lambda: 7.0}).verdict
    inside = Row("1", "x", "10", 12.0, (10.0, 10.0), 0.25, False, (1, 1))
    assert judged(inside, {"never run": lambda: 1 / 0}).verdict == "within"


def test_the_lengths_have_the_printed_means() -> None:
    assert lengths.mean_lengths(lengths.sharegpt_at_means()) == pytest.approx(
        lengths.SHAREGPT_MEANS, rel=0.01
    )
    made = lengths.mean_lengths(lengths.alpaca_like(20_000))
    assert made == pytest.approx(lengths.ALPACA_MEANS, rel=0.05)


@pytest.mark.parametrize(("ratios", "wanted"), [
    ((9.8, 1.3, 0.9), [True, True, True]), ((1.9, 1.6, 0.4), [False, False, False]),
])  # fmt: skip
def test_swapping_is_judged_by_ratios_that_can_fail(
    ratios: tuple[float, float, float], wanted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {f"swap_{size}_ms": ratio for size, ratio in zip((1, 16, 64), ratios, strict=True)}
    row = {"tokens": 512, "recompute_ms": 1.0, **times}
    monkeypatch.setattr(sharing, "swap_or_recompute", lambda _: [row])
    rows = sharing.swapping(Effort.quick())
    assert [each.is_within for each in rows] == wanted


def test_a_rate_held_is_found_however_coarse_the_rates() -> None:
    points = [(8.0, 100.0), (16.0, 1000.0)]  # the knee is at 3
    rates._find_limit(points, 1.0, lambda rate: 0.1 if rate < 3 else 100.0)
    held = rates.Curve("x", tuple(points)).sustained(1.0)
    assert held == pytest.approx(3, rel=0.05) and points == sorted(points)


def test_a_chart_tells_measured_from_modelled() -> None:
    axes = Axes("t <1>", "x", "y", log_x=True)
    lines = line_chart(axes, [Series("a", [(1, 1), (8, 2)]), Series("b", [(1, 3)], True)])
    assert lines.count("stroke-dasharray") == 2 and "t &lt;1&gt;" in lines
    assert "solid: measured" in lines and "dashed: modelled" in lines
    bars = bar_chart(Axes("t", "x", "y"), ["g"], [("a", [1.0]), ("b", [2.0])], modelled=["b"])
    assert bars.count('fill="url(#h1)"') == 2 and 'fill="url(#h0)"' not in bars


def test_a_curve_that_runs_away_is_cut_where_it_leaves_the_chart() -> None:
    away = Series("a", [(0, 0), (1, 1), (3, 5)])
    chart = line_chart(Axes("t", "x", "y", most_y=2.0), [away])
    assert chart.count("<circle") == 2, "no mark where nothing was found"
    x, y = (float(number) for number in re.findall(r"L([\d.]+) ([\d.]+)\"", chart)[0])
    left, right = LEFT, WIDTH - RIGHT
    assert (x, y) == (pytest.approx(left + (right - left) * 1.5 / 3, abs=0.1), TOP)


@pytest.mark.slow
def test_the_small_version_prints_rows_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paper", "--quick"])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    paper.main()
    out = capsys.readouterr().out
    assert "mean batch, Orca Max, Alpaca-like | 7.0" in out
    assert (tmp_path / "paper_quick.json").exists() and (tmp_path / "paper_quick.md").exists()
