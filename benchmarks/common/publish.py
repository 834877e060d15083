"""One result in three forms: JSON with what it depends on, a Markdown table, pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.common import report

RESULTS = Path(__file__).parents[1] / "results"


def publish(
    name: str,
    record: Mapping[str, Any],
    lines: Seq[str],
    pictures: Mapping[str, str],
    *,
    is_quick: bool,
    keep: bool = False,
) -> None:
    """Prints the lines; writes JSON, Markdown and SVG to benchmarks/out, or results with `keep`."""
    print("\n".join(lines))
    stem = f"{name}_quick" if is_quick else name
    folder = RESULTS if keep else report.OUT
    folder.mkdir(exist_ok=True)
    for suffix, text in pictures.items():
        (folder / f"{stem}{'_' * bool(suffix)}{suffix}.svg").write_text(text)
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n")
    path = folder / f"{stem}.json"
    whole = {"machine": report.machine(), **record}
    path.write_text(json.dumps(_rounded(whole), indent=1) + "\n")
    print("wrote", path)


def found_record(name: str) -> dict[str, Any] | None:
    """Another benchmark's record: the last run's, or the kept one."""
    for folder in (report.OUT, RESULTS):
        path = folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
    return None


def table(header: Seq[str], rows: Seq[Seq[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _rounded(value: Any) -> Any:
    """Five digits are more than any figure here is good for."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
