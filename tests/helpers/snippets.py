"""Fenced blocks of the documentation, as the tests run them.

A page reads like a notebook: its blocks run from top to bottom, Python in one namespace and
commands in one folder. What stands after the language says how a block is taken:

    ```python               runs, after the blocks above it
    ```python id=stage      runs by itself, where a test asks for it by this name: `block`
    ```sh                   runs line by line, as bash reads it
    ```sh not run: WHY      is looked at: modules, options and paths exist
    ```text                 output or a drawing
    ```json                 a value a line
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "sh", "text", "json")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_RECORD = """
_record() { printf '+%s\\0' "$@" >>"$CALLS"; printf -- '.\\0' >>"$CALLS"; }
python() { _record python "$@"; }
pip() { _record pip "$@"; }
"""


class Block(NamedTuple):
    """One fenced block."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Of its first line, from 1."""
    language: str
    name: str
    """What `id=` says, else ""."""
    not_run: str
    """Why it can't run in the tests, else ""."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages(*folders: str) -> list[str]:
    """README.md and the pages of these folders, as paths from the root."""
    found = [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in found)]


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The page's fenced blocks in order. Raises ValueError for one that is marked wrongly."""
    text = read_page(page)
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        language, name, not_run = _info(match[1], f"{page}:{line}")
        found.append(Block(page, line, language, name, not_run, match[2]))
    return found


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", read_page(page))


def block(page: str, name: str) -> Block:
    """The page's one block of this id."""
    (found,) = (each for each in blocks(page) if each.name == name)
    return found


def run_python(code: Block, names: dict[str, Any]) -> None:
    """Runs a block in a namespace; what fails is told with the page and its line."""
    tree = ast.parse(code.text, filename=code.page)
    ast.increment_lineno(tree, code.line - 1)
    exec(compile(tree, code.page, "exec"), names)


def commands(code: Block) -> list[str]:
    """A block's commands, lines that end in a backslash joined with the next."""
    joined = code.text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def calls(command: str, folder: Path) -> list[list[str]]:
    """Runs a command in bash, `python` and `pip` apart: returns what these would be called with.

    What else the command does, as `echo ... > file`, happens in the folder.
    """
    record = folder / ".calls"
    record.write_bytes(b"")
    script = f"CALLS={shlex.quote(str(record))}\n{_RECORD}{command}\n"
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, timeout=60)
    found: list[list[str]] = [[]]
    for entry in record.read_bytes().decode().split("\0")[:-1]:
        if entry.startswith("+"):
            found[-1].append(entry[1:])
        else:
            found.append([])
    record.unlink()
    return found[:-1]


def _info(info: str, where: str) -> tuple[str, str, str]:
    """(language, id, why it is not run) of what stands after a fence's backticks."""
    head, _, not_run = info.partition("not run:")
    language, *others = head.split() or [""]
    names = [word.removeprefix("id=") for word in others]
    if language not in LANGUAGES or len(names) > 1 or not all(w.startswith("id=") for w in others):
        raise ValueError(f"{where}: got the fence {info!r}, wanted one of {LANGUAGES}")
    return language, names[0] if names else "", not_run.strip()
