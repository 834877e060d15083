"""The compile check itself, where the extra `check` is installed: a sound step and every fault."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.check.faults import FAULTS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax_cuda12_plugin", "nvidia")),
    reason="the extra `check` is not installed: CI's stage for it has it",
)
RULES = {
    "spilling-tile": "no-spill",
    "narrow-load": "wide-loads",
    "undonated-pool": "pools-aliased",
    "layer-scan": "one-graph",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_exits_1_with_the_rule_named(fault: str) -> None:
    done = _check("--target", "a100", "--seed-fault", fault)
    assert done.returncode == 1, done.stdout
    assert f"BROKEN {RULES[fault]}: a100, fault:" in done.stdout


def test_the_step_without_a_fault_exits_0() -> None:
    done = _check("--target", "a100", "--program", "pallas_kernels.check.faults:toy_step")
    assert done.returncode == 0, done.stdout
    assert "1 graph(s), 0 outside" in done.stdout


def _check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pallas_kernels.check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
