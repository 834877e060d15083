"""Reads a disassembly (SASS): which instructions a kernel and its main loop hold."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_FUNCTION = re.compile(r"^\.text\.([\w$]+):$", re.M)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_GOAL = re.compile(r"`\((\.L_x_\d+)\)")
LOADS = ("LDG", "LDGSTS", "UBLKCP", "UTMALDG")
ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")
MATRIX = ("HMMA", "HGMMA", "IMMA", "QGMMA", "IGMMA", "UTCHMMA")


@dataclass(frozen=True, slots=True)
class Code:
    """Counts of a kernel's instructions, as a warp executes them."""

    num_instructions: int
    num_matrix: int
    num_atomics: int
    loop_instructions: int
    """Of one turn of the main loop; 0: there is no loop."""
    loop_matrix: int
    loop_wide_loads: int
    """Reads of global memory of 16 bytes a thread."""
    loop_half_loads: int
    """Reads of 8 bytes: K or V of an 8-bit pool."""
    loop_odd_loads: int
    """Reads of 1 or 2 bytes: no block id or scale is so small, so they are of K or V."""
    loop_word_loads: int
    """Reads of 4 bytes: block ids and scales; of K or V too, where there are too few wider ones."""


def parse_code(disassembly: str) -> dict[str, Code]:
    """The instructions of each kernel of a disassembly."""
    parts = _FUNCTION.split(disassembly)[1:]
    return {
        name: _count(text.splitlines()) for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _count(lines: list[str]) -> Code:
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.startswith("//-----"):
            break
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.match(line):
            code.append((found[1], found[2]))
    start, end = _main_loop(code, labels)
    everything = Counter(name for name, _ in code if name != "NOP")
    loop = Counter(name for name, _ in code[start:end] if name != "NOP")
    widths = Counter(width for name in loop.elements() if (width := _load_bytes(name)))
    return Code(
        num_instructions=sum(everything.values()),
        num_matrix=_of(everything, MATRIX),
        num_atomics=_of(everything, ATOMICS),
        loop_instructions=sum(loop.values()),
        loop_matrix=_of(loop, MATRIX),
        loop_wide_loads=widths[16],
        loop_half_loads=widths[8],
        loop_odd_loads=widths[1] + widths[2],
        loop_word_loads=widths[4],
    )


def _main_loop(code: list[tuple[str, str]], labels: dict[str, int]) -> tuple[int, int]:
    """(first, last + 1) of the longest stretch that a jump backwards repeats; (0, 0) for none.

    A jump to itself, which pads the end of a kernel, is no loop.
    """
    longest = (0, 0)
    for place, (name, rest) in enumerate(code):
        goal = _GOAL.search(rest)
        if name.partition(".")[0] != "BRA" or goal is None:
            continue
        start = labels.get(goal[1], place)
        if start < place and place + 1 - start > longest[1] - longest[0]:
            longest = (start, place + 1)
    return longest


def _load_bytes(name: str) -> int:
    """Bytes a thread reads from global memory with this instruction; 0: none."""
    base, *flags = name.split(".")
    if base not in LOADS:
        return 0
    for flag, size in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if flag in flags:
            return size
    return 4


def _of(counts: Counter[str], names: tuple[str, ...]) -> int:
    return sum(number for name, number in counts.items() if name.partition(".")[0] in names)
