"""What contributors are told and given is true: paths, versions in several places, the lock."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEV_TOOLS = (ROOT / ".ci" / "dev-tools.txt").read_text(encoding="utf-8")
WITH_PATHS = (
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
    ".pre-commit-config.yaml",
    ".ci/run",
)
PATH = re.compile(
    r"(?<![\w./$-])(?:tests|docs|jaxpage|benchmarks|\.ci|\.github)(?:/[\w.-]*[\w-])+"
    r"|(?<![\w./-])[\w-]+\.(?:md|lock|toml|cff)\b"
)


@pytest.mark.parametrize("name", WITH_PATHS)
def test_every_path_that_is_named_exists(name: str) -> None:
    paths = set(PATH.findall((ROOT / name).read_text(encoding="utf-8")))
    assert paths
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing, f"{name} names what is not there: {missing}"


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [PROJECT["project"]["version"]]


def test_the_linter_is_the_same_everywhere() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    wanted = re.findall(r"\b(ruff==[\d.]+)", hooks)
    assert wanted
    for requirement in [*wanted, *PROJECT["dependency-groups"]["dev"]]:
        pinned = re.sub(r"\[.*\]", "", requirement)
        assert re.search(rf"^{re.escape(pinned)} ", DEV_TOOLS, re.MULTILINE), requirement


def test_the_lock_is_of_these_requirements() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    [ours] = [package for package in lock["package"] if package["name"] == "jaxpage"]
    locked = {
        (item.get("marker", ""), item["name"], tuple(item.get("extras", ())), item["specifier"])
        for item in ours["metadata"]["requires-dist"]
    }
    project = PROJECT["project"]
    wanted = _asked("", project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        wanted |= _asked(f"extra == '{extra}'", requirements)
    assert locked == wanted, "uv.lock is of other requirements: run `uv lock`"
    assert ours["version"] == project["version"], "uv.lock is of another version: run `uv lock`"


def _asked(marker: str, requirements: Iterable[str]) -> set[tuple[str, str, tuple[str, ...], str]]:
    """Requirements as the lock writes them."""
    asked = map(Requirement, requirements)
    return {
        (marker, canonicalize_name(each.name), tuple(sorted(each.extras)), str(each.specifier))
        for each in asked
    }
