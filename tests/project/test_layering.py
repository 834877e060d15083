"""The import rules of the architecture, read from the source of every shipped module with `ast`.

The table below is the law. A module without a row fails, so that a new file is a decision about
what it may know. Imports inside functions and under TYPE_CHECKING count like all others: what a
room may not know, it may not name either. The standard library is open to all.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("jaxpage", "pallas_kernels", "convert")


class Room(NamedTuple):
    """What the modules of one row may import: parts of this project, other packages."""

    ours: str
    others: str = ""


HOST = "jaxpage.config jaxpage.sampling_params jaxpage.outputs jaxpage.errors"
TEXT = "jaxpage.tokenizer jaxpage.tokenizers jaxpage.reading jaxpage.errors"

ROOMS = {
    "jaxpage.__init__": Room("jaxpage"),  # lazily: see test_package.py
    "jaxpage.errors": Room(""),
    "jaxpage.reading": Room("jaxpage.errors"),
    "jaxpage.outputs": Room(""),
    "jaxpage.interrupts": Room(""),
    "jaxpage.config": Room("jaxpage.errors"),
    "jaxpage.numbers": Room("jaxpage.reading"),
    "jaxpage.sampling_params": Room("jaxpage.errors jaxpage.numbers"),
    "jaxpage.terms": Room("", "jax numpy"),
    "jaxpage.memory": Room("jaxpage.terms"),
    "jaxpage.unsupported": Room("jaxpage.sampling_params jaxpage.errors"),
    "jaxpage.tokenizer": Room(TEXT, "tokenizers"),
    "jaxpage.tokenizers": Room(
        "jaxpage.tokenizers jaxpage.reading jaxpage.errors", "sentencepiece tokenizers"
    ),
    "jaxpage.chat_template": Room(
        "jaxpage.sandbox jaxpage.tokenizers jaxpage.reading jaxpage.errors", "jinja2"
    ),
    "jaxpage.sandbox": Room("jaxpage.sandbox jaxpage.errors", "jinja2"),
    "jaxpage.checkpoint": Room(
        "jaxpage.device.placement jaxpage.formats jaxpage.config jaxpage.memory jaxpage.terms "
        "jaxpage.tokenizer jaxpage.errors",
        "jax",
    ),
    "jaxpage.fields": Room("jaxpage.config jaxpage.errors"),
    "jaxpage.formats": Room(
        f"jaxpage.formats jaxpage.fields jaxpage.models jaxpage.config {TEXT}",
        "jax numpy ml_dtypes orbax gguf",
    ),
    "jaxpage.formats.locate": Room("jaxpage.config jaxpage.errors", "huggingface_hub"),
    "jaxpage.formats.torch_io": Room(
        "jaxpage.formats jaxpage.config jaxpage.reading jaxpage.errors", "numpy ml_dtypes torch"
    ),
    "jaxpage.host": Room(f"jaxpage.host {HOST}"),
    "jaxpage.native": Room("jaxpage.native jaxpage.errors", "jax numpy"),
    "jaxpage.weights": Room("", "jax"),
    "jaxpage.device": Room(
        "jaxpage.device jaxpage.weights jaxpage.config jaxpage.terms jaxpage.errors",
        "jax numpy jaxtyping",
    ),
    "jaxpage.backends": Room(
        "jaxpage.backends jaxpage.device jaxpage.native jaxpage.weights jaxpage.config "
        "jaxpage.errors",
        "jax flax",
    ),
    "jaxpage.backends.pallas": Room(
        "jaxpage.backends jaxpage.device jaxpage.config pallas_kernels", "jax"
    ),
    "jaxpage.models": Room(
        "jaxpage.models jaxpage.backends jaxpage.device.ops jaxpage.device.types jaxpage.weights "
        "jaxpage.fields jaxpage.config jaxpage.terms jaxpage.errors",
        "jax numpy flax",
    ),
    "jaxpage.functional": Room("jaxpage.backends jaxpage.device jaxpage.terms", "jax jaxtyping"),
    "jaxpage.engine": Room(
        "jaxpage.engine jaxpage.host jaxpage.device jaxpage.backends jaxpage.models "
        "jaxpage.checkpoint jaxpage.unsupported jaxpage.memory "
        "jaxpage.terms jaxpage.numbers jaxpage.chat_template jaxpage.tokenizer jaxpage.reading "
        f"{HOST}",
        "jax numpy",
    ),
    "jaxpage.generate": Room(
        "jaxpage.cli jaxpage.engine jaxpage.interrupts jaxpage.sampling_params jaxpage.outputs "
        "jaxpage.errors",
        "jax tqdm",
    ),
    "jaxpage.cli": Room(f"jaxpage.cli {HOST}"),
    "jaxpage.cli.block_picture": Room("jaxpage.outputs jaxpage.errors", "cairosvg"),
    "pallas_kernels": Room("pallas_kernels", "jax"),
    "convert": Room(
        "convert jaxpage.formats jaxpage.models.family jaxpage.config jaxpage.chat_template "
        f"{TEXT}",
        "numpy",
    ),
    "convert.__main__": Room("convert jaxpage.config jaxpage.errors jaxpage.interrupts", "tqdm"),
}

LAZY_ONLY = ("torch", "cairosvg")
"""Imported inside a function, so that nobody needs it who does not read such files."""
CATCHERS = ("jaxpage.reading",)
"""Who catches everything: what strangers' files, and callers' tokenizers, make libraries raise."""
PICKLERS = ("_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
"""Never. Of `pickle` itself only the error that torch raises may be named."""
ENVIRONMENT = ("XDG_CACHE_HOME",)
"""Variables that may be read: where caches go. No variable changes behaviour."""


def shipped_files() -> Iterator[tuple[str, Path]]:
    """Every shipped module by its dotted name; a package's own file ends in `.__init__`."""
    for top in SHIPPED:
        for path in sorted((ROOT / top).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def violations(module: str, source: str) -> list[str]:
    """What `source` does that the rules forbid to `module`, one line each."""
    tree = ast.parse(source)
    room = _room_of(module)
    if room is None:
        return [f"{module}: has no row in ROOMS: decide what it may know"]
    found = [
        f"{module}:{line} imports {target}"
        for line, target, base in _imports(module, tree)
        if not _may_import(module, room, target, base)
    ]
    found += [f"{module}:{line} imports {name} at the top" for line, name in _top_level_lazy(tree)]
    found += [
        f"{module}:{line} {what}"
        for line, what in _forbidden(tree)
        if not (module in CATCHERS and what.startswith("catches"))
    ]
    return found


def _room_of(module: str) -> Room | None:
    """The row of the module or of the nearest package around it."""
    name = module
    while name not in ROOMS and "." in name:
        name = name.rpartition(".")[0]
    return ROOMS.get(name)


def _imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, what is imported, the module it is taken from) of every import in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value, name.value


def _may_import(module: str, room: Room, target: str, base: str) -> bool:
    if _covers("jax._src", target):
        return module.endswith("._compat")
    top = target.partition(".")[0]
    if top in PICKLERS or (top == "pickle" and target not in ("pickle", "pickle.UnpicklingError")):
        return False
    if top in SHIPPED:
        return any(_covers(name, target) or _covers(name, base) for name in room.ours.split())
    return top in sys.stdlib_module_names or top in room.others.split()


def _covers(name: str, target: str) -> bool:
    return target == name or target.startswith(name + ".")


def _top_level_lazy(tree: ast.Module) -> Iterator[tuple[int, str]]:
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        for name in LAZY_ONLY:
            if any(_covers(name, imported) for imported in names):
                yield node.lineno, name


def _forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Habits that no shipped module may have."""
    reads = [node for node in ast.walk(tree) if _is_cache_path(node)]
    allowed = {id(node) for read in reads for node in ast.walk(read)}
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler():
                kinds = ast.unparse(node.type) if node.type else "BaseException"
                if {"Exception", "BaseException"} & set(kinds.strip("()").split(", ")):
                    yield node.lineno, f"catches {kinds}: name what can be handled"
            case ast.Attribute(attr="_src") if ast.unparse(node) == "jax._src":
                yield node.lineno, "reaches into jax._src"
            case ast.Attribute(attr="environ" | "getenv" | "putenv") if id(node) not in allowed:
                yield node.lineno, "reads or sets an environment variable"
            case ast.ImportFrom(module="os", names=names) if _takes_environ(names):
                yield node.lineno, "takes environ out of os, where this test cannot follow it"
            case ast.Attribute(value=ast.Name("pickle"), attr=name) if name != "UnpicklingError":
                yield node.lineno, f"uses pickle.{name}"
            case ast.Import(names=names) if any(a.name == "pickle" and a.asname for a in names):
                yield node.lineno, "renames pickle, so that this test cannot follow it"
            case ast.Global():
                yield node.lineno, "rebinds a global"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield node.value.lineno, "unpickles with NumPy"
            case ast.Call() if ast.unparse(node.func) == "torch.load":
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if options.get("weights_only") != "True":
                    yield node.lineno, "calls torch.load without weights_only=True"


def _takes_environ(names: list[ast.alias]) -> bool:
    return any(alias.name in ("environ", "getenv", "putenv") for alias in names)


def _is_cache_path(node: ast.AST) -> bool:
    """`os.environ["X"]`, `os.environ.get("X")` or `os.getenv("X")` of an allowed variable."""
    match node:
        case ast.Subscript(value=where, slice=ast.Constant(value=key), ctx=ast.Load()):
            return ast.unparse(where) == "os.environ" and key in ENVIRONMENT
        case ast.Call(func=where, args=[ast.Constant(value=key), *_]):
            return ast.unparse(where) in ("os.environ.get", "os.getenv") and key in ENVIRONMENT
    return False


def test_every_module_keeps_to_its_room() -> None:
    found = [
        line
        for module, path in shipped_files()
        for line in violations(module, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("jaxpage.host.plan", "import jax", "imports jax"),
        ("jaxpage.host.plan", "import numpy as np", "imports numpy"),
        ("jaxpage.host.plan", "def f():\n    import jax.numpy", ":2 imports jax.numpy"),
        ("jaxpage.host.plan", "from jaxpage.device import types", "imports jaxpage.device.types"),
        ("jaxpage.host.plan", "from ..device.types import LayerKV", "jaxpage.device.types.LayerKV"),
        ("jaxpage.host.plan", "from jaxpage import engine", "imports jaxpage.engine"),
        ("jaxpage.host.__init__", "from ..engine import llm", "imports jaxpage.engine.llm"),
        ("jaxpage.host.plan", "import importlib as i\ni.import_module('jax')", ":2 imports jax"),
        ("jaxpage.device.step", "from jaxpage.host.plan import Draw", "imports jaxpage.host.plan"),
        ("jaxpage.device.step", "import jaxpage.tokenizer", "imports jaxpage.tokenizer"),
        ("jaxpage.device.step", "import pallas_kernels", "imports pallas_kernels"),
        ("jaxpage.device.step", "from jaxpage.models import llama", "imports jaxpage.models"),
        ("jaxpage.models.llama", "from jaxpage.device.step import draw", "jaxpage.device"),
        ("jaxpage.models.llama", "import jaxpage.engine", "imports jaxpage.engine"),
        ("jaxpage.checkpoint", "from jaxpage.engine import LLM", "imports jaxpage.engine"),
        ("jaxpage.checkpoint", "import torch", "imports torch"),
        ("pallas_kernels.decode", "import numpy", "imports numpy"),
        ("pallas_kernels.decode", "import jaxpage", "imports jaxpage"),
        ("pallas_kernels.decode", "from jax._src.pallas import x", "imports jax._src.pallas"),
        ("jaxpage.formats.rules", "from jaxpage import checkpoint", "imports jaxpage.checkpoint"),
        ("jaxpage.formats.rules", "import transformers", "imports transformers"),
        ("jaxpage.formats.rules", "from convert.run import convert", "imports convert.run"),
        ("jaxpage.checkpoint", "from convert.run import convert", "imports convert.run"),
        ("jaxpage.newcomer", "", "has no row"),
        ("jaxpage.config", "import pickle\npickle.load(f)", ":2 uses pickle.load"),
        ("jaxpage.config", "import pickle as p", "renames pickle"),
        ("jaxpage.config", "from pickle import load", "imports pickle.load"),
        ("jaxpage.config", "import dill", "imports dill"),
        ("jaxpage.config", "import jax\njax._src.core", "reaches into jax._src"),
        ("jaxpage.config", "try:\n    f()\nexcept Exception:\n    pass", ":3 catches Exception"),
        ("jaxpage.config", "try:\n    f()\nexcept:\n    pass", "catches BaseException"),
        ("jaxpage.config", "try:\n    f()\nexcept (OSError, Exception):\n    pass", "catches"),
        ("jaxpage.config", "import os\nos.environ['DEBUG']", ":2 reads or sets"),
        ("jaxpage.config", "import os\nos.environ['XDG_CACHE_HOME'] = ''", "reads or sets"),
        ("jaxpage.config", "from os import environ", "takes environ"),
        ("jaxpage.config", "def f():\n    global x", "rebinds a global"),
        ("jaxpage.formats.rules", "import numpy as np\nnp.load(f, allow_pickle=True)", "unpickles"),
        ("jaxpage.formats.rules", "torch.load(f, mmap=True)", "without weights_only"),
    ],
)
def test_the_checker_finds_a_fault(module: str, source: str, complaint: str) -> None:
    assert complaint in "\n".join(violations(module, source))


@pytest.mark.parametrize("top", LAZY_ONLY)
def test_the_checker_wants_heavy_packages_inside_functions(
    top: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROOMS, "convert", Room("convert", top))
    assert "at the top" in "\n".join(violations("convert.reader", f"import {top}.nn"))
    assert not violations("convert.reader", f"def read():\n    import {top}.nn")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxpage.host.plan", "import math\nfrom jaxpage import config\nfrom . import ladder"),
        (
            "jaxpage.backends.pallas",
            "from jax import Array\nfrom pallas_kernels import paged",
        ),
        ("jaxpage.engine.batch", "from jaxpage.host.plan import Draw\nimport jaxpage.device.step"),
        ("pallas_kernels._compat", "from jax._src.pallas import core"),
        ("jaxpage.config", "import os\nos.environ.get('XDG_CACHE_HOME')"),
        ("jaxpage.config", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
    ],
)
def test_the_checker_accepts_what_the_rules_allow(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_every_row_has_a_module() -> None:
    modules = [module for module, _ in shipped_files()]
    stale = [row for row in ROOMS if not any(_covers(row, module) for module in modules)]
    assert not stale, f"rows of ROOMS that no file falls under: {stale}"
