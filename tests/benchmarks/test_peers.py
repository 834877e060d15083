"""The peers benchmark runs end to end on the tiny model, with no peer installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import MODEL_DIR

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.speed.peers", "--quick", "--model", str(MODEL_DIR)]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_quick_form_measures_every_job() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    for job in ("batch", "stream", "prefill"):
        assert f"| {job} | ours | " in done.stdout
    assert "- vllm_cpu: missing: not named in this run" in done.stdout


@pytest.mark.parametrize("spec", ["nobody=python:model", "vllm_cpu=python"])
def test_a_peer_that_is_none_is_refused(spec: str) -> None:
    done = run("--peer", spec)
    assert done.returncode == 2
    assert f"got --peer {spec}, wanted one of" in done.stderr
