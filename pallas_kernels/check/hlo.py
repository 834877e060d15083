"""Reads what XLA wrote about a program: its launches, its CUDA graphs, its copies of a pool."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.M)
_LAUNCH = re.compile(
    r"kCustomKernel\s+\[[^\]]*\]\s+(\S+) grid: (\[[^\]]*\]) threads: (\[[^\]]*\])"
    r"\s+shared_memory: (\d+)"
)
_RESULT = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
COPIES = ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "gather", "concatenate")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a program."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """What a program does, in order."""

    launches: tuple[Launch, ...]
    num_graphs: int
    """CUDA graphs ("command buffers")."""
    num_outside: int
    """Thunks (XLA's steps) outside of any graph, each with a launch of its own."""


def parse_thunks(text: str) -> Sequence:
    """What XLA's `thunk_sequence_after_thunk_passes` text says."""
    outermost = [kind for indent, kind in _THUNK.findall(text) if not indent]
    launches = [
        Launch(name, tuple(json.loads(grid)), math.prod(json.loads(threads)), int(shared))
        for name, grid, threads, shared in _LAUNCH.findall(text)
    ]
    graphs = outermost.count("kCommandBuffer")
    return Sequence(tuple(launches), graphs, len(outermost) - graphs)


def pool_copies(hlo: str, pools: Iterable[tuple[str, int]]) -> list[str]:
    """Instructions that make another array as large as a pool.

    `pools` are (dtype as HLO names it, elements). An update in place is a fusion or a scatter
    whose result is the pool itself: those are not copies.
    """
    wanted = set(pools)
    found = []
    for line in hlo.splitlines():
        result = _RESULT.search(line)
        if result is None or result[3] not in COPIES:
            continue
        size = math.prod(map(int, result[2].split(","))) if result[2] else 1
        if any(result[1] == dtype and size >= elements for dtype, elements in wanted):
            found.append(line.strip()[:160])
    return found
