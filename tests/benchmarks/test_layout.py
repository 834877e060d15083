"""Imports run one way between the rooms of benchmarks/, read from the source with `ast`.

The table is the law: a room may name itself, the rooms in its row, and nothing else here; imports
inside functions count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOMS = {
    "common": "",
    "sim": "common",
    "speed": "common sim",
    "checks": "common",
    "service": "common sim",
    "paper": "common sim",
    "gpu": "common",
}
"""Each room after those that it may import."""
WITH_TESTS = ("checks",)
"""Rooms that run what tests/ keeps: damaged files, attacks, recorded answers."""


def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name; a package's own file by the package's."""
    found: dict[str, ast.Module] = {}
    for path in sorted(BENCHMARKS.rglob("*.py")):
        name = ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that is imported, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, "relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str:
    """The part after `benchmarks`; empty for `benchmarks` itself."""
    return name.partition(".")[2].partition(".")[0]


def violations(module: str, tree: ast.Module) -> list[str]:
    room = room_of(module)
    if room not in ROOMS:
        return [f"{module} lies in no room" for _ in tree.body]
    allowed = {room, *ROOMS[room].split()}
    found: list[str] = []
    for name in imports(tree):
        top = name.partition(".")[0]
        if top == "benchmarks" and room_of(name) not in allowed:
            found.append(f"{module} imports {name}")
        if top == "tests" and room not in WITH_TESTS:
            found.append(f"{module} imports {name}")
    return found


def test_every_module_imports_what_its_room_may() -> None:
    found = [line for name, tree in modules().items() for line in violations(name, tree)]
    assert not found, "\n".join(found)


def test_the_table_runs_one_way() -> None:
    seen: set[str] = set()
    for room, others in ROOMS.items():
        assert seen.issuperset(others.split()), f"{room} imports a room that comes after it"
        seen.add(room)


def test_no_modules_import_each_other_in_a_circle() -> None:
    trees = modules()
    arrows = {
        name: {
            other
            for target in imports(tree)
            for other in (target, target.rpartition(".")[0])
            if other in trees and other != name
        }
        for name, tree in trees.items()
    }
    while leaves := [name for name, others in arrows.items() if not others & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"in or behind a circle: {sorted(arrows)}"


@pytest.mark.slow
def test_what_lies_in_common_is_used_by_more_than_one_room() -> None:
    users: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for target in imports(tree):
            users.setdefault(target.rpartition(".")[0], set()).add(room_of(name))
    names = [name for name in modules() if name.startswith("benchmarks.common.")]
    assert not [name for name in names if len(users.get(name, set()) - {"common"}) < 2]


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("benchmarks.sim.cost", "from benchmarks.common.report import save", True),
        ("benchmarks.sim.cost", "from benchmarks.speed import peers", False),
        ("benchmarks.paper.rates", "from benchmarks.service.pressure import main", False),
        ("benchmarks.gpu.step", "def f():\n    import benchmarks.speed.peers", False),
        ("benchmarks.checks.fuzz", "from tests.fuzz.harness import run_all", True),
        ("benchmarks.speed.peers", "from tests.fuzz.harness import run_all", False),
        ("benchmarks.newcomer", "import json", False),
    ],
)
def test_the_checker_finds_a_fault(module: str, source: str, is_allowed: bool) -> None:
    assert (violations(module, ast.parse(source)) == []) is is_allowed
