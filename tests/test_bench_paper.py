"""The simulations: the rivals' books, and the small version of the paper's rows."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import paper, paper_rows, paper_sharing
from benchmarks.picture import Axes, Series, bar_chart, line_chart
from benchmarks.sim import lengths
from benchmarks.sim.buddy import Buddy, chunk_of
from benchmarks.sim.cost import PAPER_SITE
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
    monkeypatch.setattr(paper_sharing, "swap_or_recompute", lambda _: [row])
    rows = paper_sharing.swapping(paper_rows.Effort.quick())
    assert [each.is_within for each in rows] == wanted


def test_a_chart_tells_measured_from_modelled() -> None:
    axes = Axes("t <1>", "x", "y", log_x=True)
    lines = line_chart(axes, [Series("a", [(1, 1), (8, 2)]), Series("b", [(1, 3)], True)])
    assert lines.count("stroke-dasharray") == 2 and "t &lt;1&gt;" in lines
    bars = bar_chart(Axes("t", "x", "y"), ["g"], [("a", [1.0]), ("b", [2.0])], modelled=["b"])
    assert bars.count('fill="url(#h1)"') == 2 and 'fill="url(#h0)"' not in bars


def test_the_small_version_prints_rows_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paper", "--quick"])
    monkeypatch.setattr("benchmarks.report.OUT", tmp_path)
    paper.main()
    out = capsys.readouterr().out
    assert "mean batch, Orca Max, Alpaca-like | 7.0" in out
    assert (tmp_path / "paper_quick.json").exists() and (tmp_path / "paper_quick.md").exists()
