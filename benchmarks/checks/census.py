"""Counts of one tree's source, or of two side by side: imports, lengths, who knows what.

    python -m benchmarks.checks.census TREE
    python -m benchmarks.checks.census OLD_TREE NEW_TREE     each cell: old -> new

All is read with `ast`, nothing is imported. Rules:

- Room: a package folder of jaxpage, with what lies under it; jaxpage's own files; convert,
  pallas_kernels, benchmarks and tests as one room each. Between rooms, each of jaxpage's own files
  counts for itself: errors and checkpoint are not one place.
- Arrow: one module imports another of the project, however often; imports inside functions and
  under TYPE_CHECKING count. `from jaxpage import native` points at jaxpage.native. Between rooms:
  one arrow from room to room, however many modules.
- Circle: a set of modules, rooms or packages that all reach each other along arrows.
- Lines: of *.py, *.cpp and *.h of what is shipped: jaxpage, convert, pallas_kernels.
- A file names a backend where it has "xla", "native", "pallas" or "reference" as a whole string
  (no docstring), or as a word of an identifier, an import or a keyword: `attend_xla`,
  `NATIVE_OPS`, `native.is_built`. Not where it is part of a path (`home / "xla"`), and not in the
  backends' own files, whose path has such a word, or the folder backends, in it.
- device_put: each place that names the function, called or handed on.
- Public names: those in the table that jaxpage/__init__.py makes `__all__` of.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.report import first_line, table

SHIPPED = ("jaxpage", "convert", "pallas_kernels")
TOPS = (*SHIPPED, "benchmarks", "tests")
SUFFIXES = (".py", ".cpp", ".h")
BACKENDS = frozenset(("xla", "native", "pallas", "reference"))
LONGEST = 10


class Length(NamedTuple):
    lines: int
    name: str


@dataclass(frozen=True)
class Source:
    """The Python modules of a tree by dotted name, parsed; a package is its `__init__`."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        return {
            module_name(path.relative_to(self.root)): ast.parse(path.read_bytes())
            for top in TOPS
            for path in sorted((self.root / top).rglob("*.py"))
        }

    @cached_property
    def rooms(self) -> dict[str, str]:
        """Each module's room."""
        packages = {
            module_name(path.relative_to(self.root))
            for path in (self.root / "jaxpage").glob("*/__init__.py")
        }
        return {name: _room_of(name, packages) for name in self.modules}

    @cached_property
    def arrows(self) -> set[tuple[str, str]]:
        """(importing module, imported module), both of this tree."""
        return {
            (name, target)
            for name, tree in self.modules.items()
            for target in imports(name, tree, self.modules, self.is_package(name))
            if target != name
        }

    def is_package(self, name: str) -> bool:
        return (self.root / name.replace(".", "/") / "__init__.py").exists()

    def shipped(self) -> Iterator[tuple[str, ast.Module]]:
        for name, tree in self.modules.items():
            if name.partition(".")[0] in SHIPPED:
                yield name, tree

    def shipped_paths(self) -> Iterator[Path]:
        for top in SHIPPED:
            yield from (p for p in sorted((self.root / top).rglob("*")) if p.suffix in SUFFIXES)

    def shipped_files(self) -> Iterator[Length]:
        """Lines of every shipped file."""
        for path in self.shipped_paths():
            yield Length(len(path.read_text().splitlines()), str(path.relative_to(self.root)))

    def filled_lines(self) -> int:
        return sum(
            bool(line.strip())
            for path in self.shipped_paths()
            for line in path.read_text().splitlines()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("trees", type=Path, nargs="+", metavar="TREE", help="one or two")
    trees = parser.parse_args().trees
    if len(trees) > 2 or not all((tree / "jaxpage").is_dir() for tree in trees):
        parser.error(f"got {' '.join(map(str, trees))}, wanted one or two folders with jaxpage/")
    print(*report_lines([Source(tree) for tree in trees]), sep="\n")


def report_lines(sources: list[Source]) -> list[str]:
    """The three tables, then what each tree's long ones and backends are."""
    return [
        *beside(("room", "files", "arrows inside", "circles inside"), map(room_counts, sources)),
        "",
        *beside(("of the whole", "count"), map(whole_counts, sources)),
        *(line for source in sources for line in lists(source)),
    ]


def room_counts(source: Source) -> dict[str, tuple[int, ...]]:
    """Files, arrows and circles inside each room."""
    found = {}
    for room in dict.fromkeys(source.rooms.values()):
        names = {name for name, home in source.rooms.items() if home == room}
        inside = {(a, b) for a, b in source.arrows if a in names and b in names}
        found[room] = (len(names), len(inside), len(circles(inside)))
    return found


def whole_counts(source: Source) -> dict[str, tuple[int, ...]]:
    between = room_arrows(source)
    calls = [name for name, tree in source.shipped() for _ in device_puts(tree)]
    files = list(source.shipped_files())
    own = [name for name, _ in source.shipped() if is_of_a_backend(name)]
    return {
        "rooms": (len(set(source.rooms.values())),),
        "arrows between rooms": (len(between),),
        "circles of rooms": (len(circles(between)),),
        "circles of whole packages": (len(circles(package_arrows(source))),),
        "shipped files": (len(files),),
        "shipped lines": (sum(each.lines for each in files),),
        "shipped lines that are not blank": (source.filled_lines(),),
        "files that name a backend": (len(naming_files(source)),),
        "a backend's own Python files": (len(own),),
        "device_put, places": (len(calls),),
        "device_put, files": (len(set(calls)),),
        "public names": (len(public_names(source.modules["jaxpage"])),),
    }


def lists(source: Source) -> Iterator[str]:
    """What the counts of one tree are of."""
    yield f"\n{source.root}\n"
    for title, circle in (
        *(("circle of packages", each) for each in circles(package_arrows(source))),
        *(("circle of rooms", each) for each in circles(room_arrows(source))),
        *(("circle of modules", each) for each in circles(source.arrows)),
    ):
        yield f"- {title}: {', '.join(sorted(circle))}"
    for name, words in naming_files(source).items():
        yield f"- names a backend: {name}: {', '.join(words)}"
    for name, tree in source.shipped():
        if count := len(list(device_puts(tree))):
            yield f"- device_put: {name}: {count}"
    functions = [each for name, tree in source.shipped() for each in functions_of(name, tree)]
    yield ""
    for title, found in (("file", source.shipped_files()), ("function", functions)):
        longest = sorted(found, reverse=True)[:LONGEST]
        yield from table(("lines", f"longest {title}s"), longest)
        yield ""


def module_name(path: Path) -> str:
    """The dotted name of a file by its path in the tree."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room_of(name: str, packages: set[str]) -> str:
    top, _, rest = name.partition(".")
    home = f"{top}.{rest.partition('.')[0]}"
    return home if home in packages else top


def imports(
    name: str, tree: ast.AST, modules: Mapping[str, object], is_package: bool
) -> Iterator[str]:
    """The modules of the tree that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                around = parts[: len(parts) - node.level + is_package]
                base = ".".join([*around, base] if base else around)
            named = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in named:
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target:
                yield target


def circles(arrows: Iterable[tuple[str, str]]) -> list[frozenset[str]]:
    """The sets of nodes, of two or more, that all reach each other."""
    targets: dict[str, set[str]] = {}
    for a, b in arrows:
        targets.setdefault(a, set()).add(b)
    reached = {node: _reached(node, targets) for node in targets}
    groups = {
        frozenset({node, *(m for m in reached[node] if node in reached.get(m, ()))})
        for node in targets
    }
    return sorted((group for group in groups if len(group) > 1), key=sorted)


def _reached(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for target in targets.get(left.pop(), ()):
            if target not in seen:
                seen.add(target)
                left.append(target)
    return seen


def room_arrows(source: Source) -> set[tuple[str, str]]:
    """Arrows between rooms; a file of jaxpage's own is a room here."""
    home = {name: name if room == "jaxpage" else room for name, room in source.rooms.items()}
    pairs = {(home[a], home[b]) for a, b in source.arrows}
    return {(a, b) for a, b in pairs if a != b}


def package_arrows(source: Source) -> set[tuple[str, str]]:
    """Arrows between jaxpage, convert, pallas_kernels, benchmarks and tests."""
    pairs = {(a.partition(".")[0], b.partition(".")[0]) for a, b in source.arrows}
    return {(a, b) for a, b in pairs if a != b}


def naming_files(source: Source) -> dict[str, list[str]]:
    """Modules that name a backend and are not its own, with what they say."""
    found = {
        name: sorted(set(backend_words(tree)))
        for name, tree in source.shipped()
        if not is_of_a_backend(name)
    }
    return {name: words for name, words in found.items() if words}


def is_of_a_backend(module: str) -> bool:
    return bool(_words(module) & {*BACKENDS, "backends"})


def backend_words(tree: ast.AST) -> Iterator[str]:
    """Strings and identifiers of a module that name a backend."""
    skipped = {id(each) for node in ast.walk(tree) for each in _no_names(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for said in _said(node):
            if _words(said) & BACKENDS:
                yield said


def _no_names(node: ast.AST) -> Iterator[ast.AST]:
    """Strings that name no backend: a docstring, a part of a path."""
    match node:
        case ast.Expr(value=ast.Constant() as docstring):
            yield docstring
        case ast.BinOp(op=ast.Div()):
            yield from (node.left, node.right)


def _said(node: ast.AST) -> Iterator[str]:
    """What a node itself spells: its identifiers, or the whole of its string."""
    match node:
        case ast.Constant(value=str(text)) if text in BACKENDS:
            yield repr(text)
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name
        case ast.ImportFrom(module=module):
            yield module or ""
        case ast.alias(name=name, asname=other):
            yield name
            yield other or ""


def _words(identifier: str) -> set[str]:
    """`attend_xla`, `NATIVE_OPS`, `XlaOps` and `a.b_c` in lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def device_puts(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="device_put") | ast.Name(id="device_put"):
                yield node


def public_names(tree: ast.Module) -> set[str]:
    """Names in the list `__all__`, or in the table of modules and names that it is made of."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as names):
                return _strings(names.elts)
            case ast.Assign(value=ast.Dict(values=[ast.Tuple(), *_] as rows)):
                return _strings(each for row in rows for each in ast.walk(row))
    raise SystemExit("error: got no table of names in jaxpage/__init__.py, wanted one")


def _strings(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def functions_of(module: str, tree: ast.AST) -> Iterator[Length]:
    """Lines of every function, from `def` to its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Length(node.end_lineno - node.lineno + 1, f"{module}.{node.name}")


def beside(header: tuple[str, ...], counts: Iterable[dict[str, tuple[int, ...]]]) -> list[str]:
    """A Markdown table of each tree's counts, cell by cell; "-" where a tree has no such row."""
    each = list(counts)
    names = list(dict.fromkeys(name for found in each for name in found))
    rows = []
    for name in names:
        columns = [found.get(name, ("-",) * (len(header) - 1)) for found in each]
        cells = [dict.fromkeys(map(str, cell)) for cell in zip(*columns, strict=True)]
        rows.append((name, *(" -> ".join(cell) for cell in cells)))
    return table(header, rows)


if __name__ == "__main__":
    main()
