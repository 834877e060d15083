"""Shared prefixes are found: results can't tell, since sharing changes no bit of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("prefixes_test.cpp")
COMPILER = shutil.which("c++")
SYSTEM = range(1, 9)
"""Blocks of 16 tokens: two chunks of 64."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("prefixes") / "prefixes"
    headers = Path(__file__).parents[2] / "jaxpage" / "native"
    command = [COMPILER, "-std=c++17", f"-I{headers}", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def find(program: Path, *rows: tuple[int, list[int]]) -> list[list[int]]:
    """[chunks, *rows] of each prefix of rows (tokens, blocks); the order of rows is free."""
    width = max(len(blocks) for _, blocks in rows)
    words = [width]
    for tokens, blocks in rows:
        words += [tokens, *blocks, *[0] * (width - len(blocks))]
    out = subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True)
    lines = [[int(word) for word in line.split()] for line in out.stdout.splitlines()]
    return sorted([chunks, *sorted(members)] for chunks, *members in lines)


def test_rows_that_begin_alike_are_found(program: Path) -> None:
    rows = [(140, [*SYSTEM, block]) for block in (20, 21, 22)]
    assert find(program, rows[0], (140, [*range(30, 39)]), *rows[1:]) == [[2, 0, 2, 3]]


def test_each_group_has_its_own_prefix(program: Path) -> None:
    other = range(40, 44)
    rows = [(130, [*SYSTEM, 20]), (70, [*other, 21]), (130, [*SYSTEM, 22]), (70, [*other, 23])]
    assert find(program, *rows) == [[1, 1, 3], [2, 0, 2]]


def test_few_rows_that_share_much_come_before_many_that_share_little(program: Path) -> None:
    long = range(1, 17)
    rows = [(260, [*long, 20]), (260, [*long, 21]), (100, [1, 2, 3, 4, 30, 31, 32])]
    assert find(program, *rows) == [[4, 0, 1]]


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        (64, [*SYSTEM]),  # less than a chunk before its own token
        (140, [1, 2, 3, 30, *range(31, 36)]),  # alike for less than a chunk
    ],
)
def test_what_is_too_short_is_not_shared(program: Path, tokens: int, blocks: list[int]) -> None:
    assert find(program, (140, [*SYSTEM, 20]), (tokens, blocks)) == []
