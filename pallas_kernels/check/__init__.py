"""Compiles the kernels for NVIDIA cards that this machine lacks, and holds the result to rules.

    python -m pallas_kernels.check --target a10g a100 h100 h200

Needs the extra `check` (the CUDA plugin, ptxas, the disassembler) and no GPU. It sees registers,
spills, load widths, launches, buffers and copies; it cannot see numbers, races or real speed.
With `--program MODULE:FUNCTION` it checks what that function returns: a `Program`, or several.
"""

from __future__ import annotations

from pallas_kernels.check.cards import CARDS, Card
from pallas_kernels.check.program import Inner, Program

__all__ = ["CARDS", "Card", "Inner", "Program"]
