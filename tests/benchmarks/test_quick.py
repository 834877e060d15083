"""Every benchmark's small version runs on the tiny model, so that none rots."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.tiny import MODEL_DIR

WITH_MODEL = [
    "speed.throughput", "speed.startup", "speed.sharing", "checks.exactness",
    "checks.mixed_settings",
]  # fmt: skip
ALONE = ["speed.host_overhead"]


@pytest.mark.slow
@pytest.mark.parametrize("module", WITH_MODEL + ALONE)
def test_the_quick_version_prints_its_figures_and_keeps_them(
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = module.partition(".")[2]
    model = ["--model", str(MODEL_DIR)] if module in WITH_MODEL else []
    monkeypatch.setattr(sys, "argv", [name, "--quick", *model])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    import_module(f"benchmarks.{module}").main()
    out = capsys.readouterr().out
    assert "DIFFERENT" not in out
    assert (tmp_path / f"{name}_quick.json").exists() or any(tmp_path.glob(f"{name}*quick.json"))
    assert "wrote" in out.splitlines()[-1]
