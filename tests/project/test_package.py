"""What the project looks like from outside: lazy imports, the folders at the top, house style."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxpage", "pallas_kernels", "convert", "tests", "benchmarks")
FILES = ("pyproject.toml", "README.md")
FOR_TOOLS = (
    "docs",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "setup.py",
    "uv.lock",
)  # and hidden names

MAX_POSITIONAL = 5
NUM_LISTED = 10


def sources() -> Iterator[tuple[str, str]]:
    """(path, text) of every Python file in the project."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def lengths(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Lines of a file and its functions, without docstrings: words that help are free."""
    yield source.count("\n"), path
    for name, function in _functions(ast.parse(source), ""):
        yield _body_lines(function), f"{path}::{name}"


def too_many_arguments(path: str, source: str) -> Iterator[str]:
    """Functions that a call of can't be read without looking them up."""
    for name, function in _functions(ast.parse(source), ""):
        positional = [*function.args.posonlyargs, *function.args.args]
        count = sum(argument.arg not in ("self", "cls") for argument in positional)
        # A kernel gets its references, and a test its fixtures, from elsewhere.
        is_free = path.startswith("pallas_kernels/") or function.name.startswith("test_")
        if count > MAX_POSITIONAL and not is_free:
            yield f"{path}::{name}: {count} positional arguments, wanted {MAX_POSITIONAL}"


def odd_lines(path: str, source: str) -> Iterator[str]:
    """Comments that the house refuses, and a missing docstring."""
    if not ast.get_docstring(ast.parse(source)) and source.strip():
        yield f"{path}:1 has no docstring that says why the file exists"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        where = f"{path}:{token.start[0]}"
        if re.search(r"\b(type|pyright): ignore(\[[\w, -]+\])?\s*$", token.string):
            yield f"{where} silences a checker and gives no reason"
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", token.string):
            yield f"{where} has a TODO without the number of an issue"


def model_kwargs(path: str, source: str) -> Iterator[str]:
    """Functions of a model that take whatever they are given."""
    if path.startswith("jaxpage/models/"):
        for name, function in _functions(ast.parse(source), ""):
            if function.args.kwarg:
                yield f"{path}::{name} takes **{function.args.kwarg.arg}"


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}" if prefix else child.name
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from _functions(child, name)


def _body_lines(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_the_longest_files_and_functions_are_listed() -> None:
    """A length is a hint to look again, no reason to cut one idea in two: `pytest -s` prints it."""
    found = [length for path, source in sources() for length in lengths(path, source)]
    for are_functions in (False, True):
        listed = sorted(
            (item for item in found if ("::" in item[1]) == are_functions), reverse=True
        )
        assert len(listed) > NUM_LISTED
        print(*(f"{lines:5} {name}" for lines, name in listed[:NUM_LISTED]), sep="\n")


def test_calls_can_be_read_without_looking_them_up() -> None:
    found = [line for path, source in sources() for line in too_many_arguments(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_every_file_says_why_it_exists_and_silences_nothing() -> None:
    found = [line for path, source in sources() for line in odd_lines(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_models_take_no_unnamed_arguments() -> None:
    found = [line for path, source in sources() for line in model_kwargs(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_the_checks_find_what_they_look_for() -> None:
    method = 'class A:\n  def f(self):\n    """Words."""\n    return 1\n'
    assert list(lengths("jaxpage/a.py", method)) == [(4, "jaxpage/a.py"), (2, "jaxpage/a.py::A.f")]
    assert list(too_many_arguments("jaxpage/a.py", "def f(a, b, c, d, e, f): pass"))
    assert not list(too_many_arguments("jaxpage/a.py", "def f(a, b, c, d, e, *, f): pass"))
    doc = '"""Why."""\n'
    assert list(odd_lines("jaxpage/a.py", "x = 1\n"))
    assert list(odd_lines("jaxpage/a.py", f"{doc}x = 1  # type: ignore[misc]\n"))
    assert list(odd_lines("jaxpage/a.py", f"{doc}# TODO: later\n"))
    assert not list(
        odd_lines("jaxpage/a.py", f"{doc}x = 1  # type: ignore[misc]  # flax lacks it\n")
    )
    assert not list(odd_lines("jaxpage/a.py", f"{doc}# TODO(#7): later\n"))
    assert list(model_kwargs("jaxpage/models/a.py", "def f(**rest): pass"))


def test_the_top_folder_holds_the_seven_names_and_what_tools_need() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    names = {path.name for path in ROOT.iterdir()}
    surplus = {
        name
        for name in names - {*FOLDERS, *FILES, *FOR_TOOLS}
        if not name.startswith(".") and not any(Path(name).match(pattern) for pattern in ignored)
    }
    assert not surplus, f"at the top of the project, and not what it is made of: {surplus}"
    missing = {*FOLDERS, *FILES} - names
    assert not missing, f"the project has seven fixed names; missing: {missing}"


HOST_MODULES = [
    path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for path, _ in sources()
    if path.startswith("jaxpage/host/")
]


@pytest.mark.parametrize(
    ("lines", "absent"),
    [
        ("import jaxpage; dir(jaxpage); jaxpage.SamplingParams(n=2)", "jax numpy flax"),
        ("import jaxpage.config, jaxpage.outputs, jaxpage.errors", "jax numpy"),
        ("import pallas_kernels", "jaxpage convert flax torch"),
        ("import convert", "jaxpage.engine torch"),
        (f"import {', '.join(HOST_MODULES)}", "jax numpy"),
    ],
)
def test_importing_a_part_loads_no_more_than_it_needs(lines: str, absent: str) -> None:
    code = f"{lines}; import sys; print(set({absent.split()}) & sys.modules.keys())"
    assert _python(code) == "set()"


def test_every_public_name_can_be_found() -> None:
    package = importlib.import_module("jaxpage")
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(package, "no_such_name")  # noqa: B009  an attribute pyright need not know


def test_shapes_and_dtypes_are_checked_in_tests() -> None:
    """The pytest option does its work: jaxpage.device refuses what its annotations refuse."""
    apply_moves = importlib.import_module("jaxpage.device.kv_cache").apply_moves
    two, three = (jnp.zeros(length, jnp.int32) for length in (2, 3))
    assert apply_moves((), two, two) == ()
    for sources in (three, two.astype(jnp.float32), two[None]):
        with pytest.raises(jaxtyping.TypeCheckError):
            apply_moves((), sources, two)


def test_the_changelog_knows_the_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert version is not None
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _python(code: str) -> str:
    """What `code` prints in a fresh interpreter, started at the top of the project."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
