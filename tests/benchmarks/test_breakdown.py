"""The small breakdown, and the roofline by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.sim.cost import A100, LLAMA_13B
from benchmarks.speed import breakdown
from tests.tiny import MODEL_DIR


def test_the_roofline_of_a_step_by_hand() -> None:
    attention, products = breakdown.part_seconds(A100, LLAMA_13B, 1, 1000)
    assert products == pytest.approx(26e9 / 1555e9)
    assert attention == pytest.approx(1000 * 819_200 / 1555e9)


@pytest.mark.slow
def test_the_small_version_has_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["breakdown", "--quick", "--model", str(MODEL_DIR)]
    monkeypatch.setattr(sys, "argv", [*call, "--attention", "xla"])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    breakdown.main()
    record = json.loads((tmp_path / "breakdown_xla_quick.json").read_text())
    for cell in record["measured"]:
        assert set(breakdown.PARTS) <= set(cell["ms"]) and cell["ms"]["step"] > 0
    assert "Attention takes" in capsys.readouterr().out
