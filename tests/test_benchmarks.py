"""Every benchmark's small version runs on the tiny model, so that none rots."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.tiny import MODEL_DIR

WITH_MODEL = ["throughput", "exactness", "mixed", "start", "sharing"]
ALONE = ["host"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MODEL + ALONE)
def test_the_quick_version_prints_its_figures_and_keeps_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(MODEL_DIR)] if name in WITH_MODEL else []
    monkeypatch.setattr(sys, "argv", [name, "--quick", *model])
    monkeypatch.setattr("benchmarks.report.OUT", tmp_path)
    import_module(f"benchmarks.{name}").main()
    out = capsys.readouterr().out
    assert "DIFFERENT" not in out
    assert (tmp_path / f"{name}_quick.json").exists() or any(tmp_path.glob(f"{name}*quick.json"))
    assert "wrote" in out.splitlines()[-1]
