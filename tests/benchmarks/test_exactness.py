"""The exactness grid fails for one id, and where nobody gave way; no model runs here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import exactness
from benchmarks.checks.exactness import KINDS, QUICK, VALUES, Outcome, Setting

Change = Callable[[Setting, Outcome], Outcome]
ALL_WAYS = [f"{mode} of {kind}" for mode, kind in product(("recompute", "swap"), KINDS)]


class StandIn:
    """A model, its tokenizer and its engine, as far as `main` asks."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def close(self) -> None:
        pass


def run_quick(monkeypatch: pytest.MonkeyPatch, out: Path, change: Change) -> int:
    """The exit code of the quick grid, where every setting's outcome is right but for `change`."""

    def run(llm: object, work: exactness.Work, setting: Setting, num_blocks: int) -> Outcome:
        is_pressed = setting.pool == "small"
        gave_way = Counter(ALL_WAYS if is_pressed else ())
        ids = [[(index,)] for index in range(len(work))]
        return change(setting, Outcome(ids, 9, 3 * is_pressed, 3 * is_pressed, 9, 0, gave_way))

    monkeypatch.setattr(sys, "argv", ["exactness", "--quick"])
    monkeypatch.setattr("benchmarks.common.report.OUT", out)
    monkeypatch.setattr(exactness, "load", lambda *_, **__: (None, None, StandIn()))
    monkeypatch.setattr(exactness, "LLM", StandIn)
    monkeypatch.setattr(exactness, "run", run)
    try:
        exactness.main()
    except SystemExit as exited:
        assert isinstance(exited.code, int)
        return exited.code
    return 0


def test_the_same_ids_under_pressure_of_all_kinds_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_quick(monkeypatch, tmp_path, lambda _, outcome: outcome) == 0
    out = capsys.readouterr().out
    assert "0 differences" in out and "NEVER" not in out and "never" not in out


def test_one_other_id_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(setting: Setting, outcome: Outcome) -> Outcome:
        if setting == QUICK[-1]:
            outcome.ids[1][0] = (99,)
        return outcome

    assert run_quick(monkeypatch, tmp_path, change) == 1
    out = capsys.readouterr().out
    assert f"DIFFERENT seeded n=3 {QUICK[-1]}" in out and ", 1 differences" in out


def test_a_way_to_give_way_that_nobody_went_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(setting: Setting, outcome: Outcome) -> Outcome:
        for kind in KINDS:
            del outcome.gave_way[f"swap of {kind}"]
        return Outcome(outcome.ids, 9, outcome.recomputed, 0, 0, 0, outcome.gave_way)

    assert run_quick(monkeypatch, tmp_path, change) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("NEVER SEEN")] == [
        f"NEVER SEEN: swap of {kind}" for kind in KINDS
    ]
    pressed = [each for each in QUICK if each.pool == "small" and each.preemption == "swap"]
    assert len(pressed) == 2
    assert [line for line in out.splitlines() if line.startswith("never pressed")] == [
        f"never pressed: {each}" for each in pressed
    ]


def test_pairwise_settings_press_every_block_size_in_both_ways() -> None:
    chosen = exactness.pairwise([Setting(*each) for each in product(*VALUES)])
    pressed = {
        (each.preemption, each.block_size)
        for each in chosen
        if each.pool == "small" and each.order != "alone"
    }
    assert pressed == {*product(("recompute", "swap"), VALUES[3])}
    assert len(chosen) < 40
