"""The counts of a small made-up tree, where each is known."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.checks import census

FILES = {
    "jaxpage/__init__.py": '_ROOMS = {"jaxpage.a": ("A", "B"), "jaxpage.b": ("C",)}\n__all__ = 1\n',
    "jaxpage/a.py": '"""Of "native" speed."""\nimport jax\nfrom jaxpage.host import plan\n',
    "jaxpage/host/__init__.py": "",
    "jaxpage/host/plan.py": "def f():\n    from . import row\n\n    return row\n",
    "jaxpage/host/row.py": "from jaxpage.host.plan import f\nimport convert.table as t\n",
    "jaxpage/native/__init__.py": "",
    "jaxpage/native/kernels.h": "int x;\n\nint y;\n",
    "convert/__init__.py": "",
    "convert/table.py": 'from jaxpage import native\nhome = root / "xla"\nname = "xla"\n',
    "pallas_kernels/__init__.py": "put = jax.device_put\nput(1)\njax.device_put(2)\n",
    "benchmarks/__init__.py": "",
    "tests/__init__.py": "",
}


@pytest.fixture
def source(tmp_path: Path) -> census.Source:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return census.Source(tmp_path)


def test_rooms_have_their_files_arrows_and_circles(source: census.Source) -> None:
    counts = census.room_counts(source)
    assert counts["jaxpage"] == (2, 0, 0)
    assert counts["jaxpage.host"] == (3, 2, 1)
    assert counts["convert"] == (2, 0, 0)
    assert census.room_arrows(source) == {
        ("jaxpage.a", "jaxpage.host"),
        ("jaxpage.host", "convert"),
        ("convert", "jaxpage.native"),
    }


def test_the_whole_is_counted(source: census.Source) -> None:
    counts = {name: count for name, (count,) in census.whole_counts(source).items()}
    assert counts == {
        "rooms": 7,
        "arrows between rooms": 3,
        "circles of rooms": 0,
        "circles of whole packages": 1,
        "shipped files": 10,
        "shipped lines": 20,
        "shipped lines that are not blank": 18,
        "files that name a backend": 1,
        "a backend's own Python files": 2,
        "device_put, places": 2,
        "device_put, files": 1,
        "public names": 3,
    }


def test_two_trees_stand_side_by_side(source: census.Source, tmp_path: Path) -> None:
    assert "| jaxpage.host | 3 | 2 | 1 |" in census.report_lines([source])
    other = tmp_path / "jaxpage" / "host" / "other.py"
    other.write_text("from jaxpage.host import row\n")
    (tmp_path / "convert" / "table.py").unlink()
    lines = census.report_lines([source, census.Source(tmp_path)])
    assert "| jaxpage.host | 3 -> 4 | 2 -> 3 | 1 |" in lines
    assert "| convert | 2 -> 1 | 0 | 0 |" in lines


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('attention = "native"', {"'native'"}),
        ("x = attend_xla(y)", {"attend_xla"}),
        ("OPS = NATIVE_OPS", {"NATIVE_OPS"}),
        ("class PallasOps: pass", {"PallasOps"}),
        ("from a import attention_pallas", {"attention_pallas"}),
        ("import a.reference.b", {"a.reference.b"}),
        ("def f(native): pass", {"native"}),
        ("f(pallas=1)", {"pallas"}),
        ('f"{native}"', {"native"}),
        ("match x:\n    case 'xla': pass", {"'xla'"}),
        ('x = "native speed"', set()),
        ("x = nativeness", set()),
        ("x = home / 'xla'", set()),
        ('"""native"""', set()),
        ("# xla\nx = 1", set()),
    ],
)
def test_what_names_a_backend(text: str, names: set[str]) -> None:
    assert set(census.backend_words(ast.parse(text))) == names


def test_circles_are_the_sets_that_reach_each_other() -> None:
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d"), ("e", "f")]
    assert census.circles(arrows) == [frozenset("abc"), frozenset("de")]


@pytest.mark.slow
def test_this_tree_is_counted() -> None:
    source = census.Source(Path(__file__).parents[2])
    counts = census.whole_counts(source)
    assert counts["public names"][0] > 30
    assert counts["shipped lines"] > counts["shipped lines that are not blank"] > (10_000,)
    assert "jaxpage.host" in census.room_counts(source)
