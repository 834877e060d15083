"""What every benchmark does alike: interleaved rounds, medians with spread, raw JSON kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "out"


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of the same thing measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"

    def __truediv__(self, other: Spread) -> Spread:
        """Ratios of figures taken in the same round."""
        return Spread(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


def interleave(runs: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, Spread]:
    """Runs everything `rounds` times, one after another in each round; a run returns its figure."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            values[name].append(run())
    return {name: Spread(tuple(figures)) for name, figures in values.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def first_line(docstring: str | None) -> str:
    """A module's docstring as its command's description."""
    return (docstring or "").strip().partition("\n")[0]


def machine() -> dict[str, Any]:
    """What a figure must carry: commit, processor, versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "torch", "transformers")},
    }


def save(name: str, record: Mapping[str, Any]) -> Path:
    """Writes benchmarks/out/NAME.json and returns its path."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
    return path


def _commit() -> str:
    here = Path(__file__).parent
    call = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
