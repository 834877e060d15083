"""How every result is kept: JSON with what it depends on, a Markdown table, pictures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "out"
RESULTS = Path(__file__).parents[1] / "results"


def save(
    name: str,
    record: Mapping[str, Any],
    *,
    lines: Seq[str] = (),
    pictures: Mapping[str, str] | None = None,
    is_quick: bool = False,
    keep: bool = False,
) -> None:
    """Writes NAME.json to benchmarks/out, or to benchmarks/results with `keep`, and says where.

    lines: printed, and written to NAME.md. pictures: SVG texts, by what stands behind the name.
    A quick run's files end in _quick.
    """
    stem = f"{name}_quick" if is_quick else name
    folder = RESULTS if keep else OUT
    folder.mkdir(exist_ok=True)
    if lines:
        print("\n".join(lines))
        (folder / f"{stem}.md").write_text("\n".join(lines) + "\n")
    for suffix, text in (pictures or {}).items():
        (folder / f"{stem}{'_' * bool(suffix)}{suffix}.svg").write_text(text)
    path = folder / f"{stem}.json"
    whole = {"machine": _machine(), **record}
    path.write_text(json.dumps(_rounded(whole) if keep else whole, indent=1) + "\n")
    print("wrote", path)


def found_record(name: str) -> dict[str, Any] | None:
    """Another benchmark's record: the last run's, or the kept one."""
    for folder in (OUT, RESULTS):
        path = folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
    return None


def table(header: Seq[str], rows: Seq[Seq[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]


def first_line(docstring: str | None) -> str:
    """A module's docstring as its command's description."""
    return (docstring or "").strip().partition("\n")[0]


def _machine() -> dict[str, Any]:
    """What a figure must carry: commit, processor, versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "torch", "transformers")},
    }


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


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _rounded(value: Any) -> Any:
    """What is committed: five digits are more than any figure here is good for."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
