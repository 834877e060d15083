"""Which way up ratios are, whose turn it is, and what a tree's worker measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.trees import run_in_tree
from benchmarks.speed import two_builds
from benchmarks.speed import two_builds_worker as worker
from jaxpage import LLM
from tests.tiny import MODEL_DIR

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "old", "new", "wanted"),
    [
        ("batch", [100.0, 100.0, 100.0], [110.0, 90.0, 105.0], 1.05),
        ("host", [2.0, 2.0, 2.0], [1.0, 2.0, 4.0], 1.0),
        ("programs", [30.0], [40.0], 0.75),
        ("cold_s", [10.0, 20.0], [5.0, 10.0], 2.0),
    ],
)
def test_ratios_over_one_mean_that_the_new_tree_is_better(
    name: str, old: list[float], new: list[float], wanted: float
) -> None:
    before, after = ([{name: figure} for figure in each] for each in (old, new))
    found = two_builds.ratio(name, before, after)
    assert found.median == pytest.approx(wanted)
    assert two_builds.is_slower(found) == (wanted < 0.98)
    lines = two_builds.report_lines({"old": before, "new": after}, {name: found})
    assert f"{wanted:.3f} (" in lines[-1]


def test_rounds_are_interleaved_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    seconds = {"old": 2.0, "new": 4.0}

    def run_in_tree(
        tree: Path, file: str, job: dict[str, Any], *, cache: str
    ) -> dict[str, dict[str, float]]:
        assert cache.endswith(f"/{tree.name}")
        ran.append(tree.name)
        return {"figures": {"batch": 100.0, "host": seconds[tree.name]}}

    options = ["--rounds", "2", "--no-starts", "--quick"]
    monkeypatch.setattr(sys, "argv", ["two_builds", "some/old", "some/new", *options])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    monkeypatch.setattr(two_builds, "run_in_tree", run_in_tree)
    assert two_builds.main() == 1
    assert ran == ["old", "new", "old", "new", "new", "old"]
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "under 0.98: host, ms a step of the batch"
    record = json.loads((tmp_path / "two_builds_quick.json").read_text())
    assert record["ratios"] == {"batch": [1.0, 1.0], "host": [0.5, 0.5]}


@pytest.mark.slow
def test_the_worker_measures_the_tiny_model() -> None:
    llm = LLM(str(MODEL_DIR), attention="xla", num_blocks=16, max_num_seqs=2, seed=0)
    figures = {
        **worker.batch(llm, ["Anna has", "3 + 4"], [3, 2]),
        **worker.stream(llm, [1, 5, 9], 3),
        **worker.prefill(llm, [1, 5, 9]),
    }
    llm.close()
    assert set(figures) == {"batch", "host", "stream", "prefill"}
    assert min(figures.values()) > 0


def test_a_file_runs_in_the_tree_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "told.py"
    file.write_text(
        "import json, os, sys, jaxpage\n"
        "told = json.load(sys.stdin)\n"
        "told |= {'jaxpage': jaxpage.__file__, 'cache': os.environ['XDG_CACHE_HOME']}\n"
        "print('noise')\n"
        "print(json.dumps(told))\n"
    )
    tree = tmp_path / "tree"
    (tree / "jaxpage").mkdir(parents=True)
    (tree / "jaxpage" / "__init__.py").touch()
    for each in (tree, ROOT):
        told = run_in_tree(each, str(file), {"job": 1}, cache="some/where")
        home = str(each.resolve() / "jaxpage" / "__init__.py")
        assert told == {"job": 1, "cache": "some/where", "jaxpage": home}
