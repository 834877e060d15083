"""Compiles programs for one card, in a process of its own, and writes a report of each as JSON.

Each card has its process, because a compiler that aborts takes its process with it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.check.cards import CARDS, Card
from pallas_kernels.check.compile import Compiled, compile_for
from pallas_kernels.check.cost import LAUNCH_US, MEMORY_SHARE, occupancy, predict
from pallas_kernels.check.faults import FAULTS
from pallas_kernels.check.program import Program
from pallas_kernels.check.rules import breaches
from pallas_kernels.check.shapes import kernel_programs


def main() -> None:
    """argv: the work as JSON (see `run_target`), and the path of the file to write."""
    work, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    card = CARDS[work["target"]]
    programs = gather(card, modules=work["programs"], fault=work["fault"])
    chosen = [program for program in programs if re.search(work["only"], program.name)]
    rows = []
    for program in chosen:
        rows.append(describe(program, compile_for(program, card), card))
        path.write_text(json.dumps(rows), encoding="utf-8")  # kept if the next one aborts


def gather(card: Card, *, modules: list[str], fault: str | None) -> list[Program]:
    """The programs of this run. Raises ValueError for a module without a function's name."""
    if fault is not None:
        return [FAULTS[fault](card)]
    if not modules:
        return kernel_programs(card)
    programs: list[Program] = []
    for name in modules:
        module, _, function = name.partition(":")
        if not function:
            raise ValueError(f"got --program {name}, wanted MODULE:FUNCTION; name the function")
        made = getattr(importlib.import_module(module), function)(card)
        programs += [made] if isinstance(made, Program) else made
    return programs


def describe(program: Program, compiled: Compiled, card: Card) -> dict[str, Any]:
    """What is reported of a program, as JSON."""
    kernels = [_describe_kernel(program, compiled, name, card) for name in compiled.kernels]
    attention_us = sum(
        kernel["launches"] * kernel["predicted_us"] for kernel in kernels if kernel["is_attention"]
    )
    return {
        "program": program.name,
        "is_step": program.is_step,
        "kernels": kernels,
        "graphs": compiled.sequence.num_graphs,
        "outside": compiled.sequence.num_outside,
        "launches": len(compiled.sequence.launches),
        "pool_bytes": program.pool_bytes,
        "alias_bytes": compiled.alias_bytes,
        "temp_bytes": compiled.temp_bytes,
        "copies": len(compiled.copies),
        "compile_s": compiled.compile_s,
        **_step_time(program, compiled, card, attention_us * 1e-6),
        "breaches": [
            {"rule": breach.rule, "what": breach.what}
            for breach in breaches(program, compiled, card)
        ],
    }


def _describe_kernel(program: Program, compiled: Compiled, name: str, card: Card) -> dict[str, Any]:
    """What is reported of one of its kernels; times of attention kernels only."""
    kernel, inner = compiled.kernels[name], program.kernels.get(name)
    resident, share = occupancy(kernel, card)
    row = {
        "name": name,
        "launches": kernel.num_launches,
        "grid": kernel.grid,
        "threads": kernel.threads,
        "registers": kernel.usage.registers,
        "spill_bytes": kernel.usage.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "resident": resident,
        "occupancy": share,
        "loop_instructions": kernel.code.loop_instructions,
        "loop_wide_loads": kernel.code.loop_wide_loads,
        "loop_word_loads": kernel.code.loop_word_loads,
        "loop_half_loads": kernel.code.loop_half_loads,
        "loop_odd_loads": kernel.code.loop_odd_loads,
        "loop_matrix": kernel.code.loop_matrix,
        "atomics": kernel.code.num_atomics,
        "is_attention": inner is not None,
    }
    if inner is None:
        return row
    cost = predict(kernel, inner, card)
    return row | {
        "memory_us": cost.memory_s * 1e6,
        "issue_us": cost.issue_s * 1e6,
        "matrix_us": cost.matrix_s * 1e6,
        "predicted_us": cost.total_s * 1e6,
        "floor_us": cost.floor_s * 1e6,
    }


def _step_time(
    program: Program, compiled: Compiled, card: Card, attention_s: float
) -> dict[str, float]:
    """A step's predicted and least time in ms: weights, attention, other launches; {}: no step."""
    if not program.is_step:
        return {}
    launches = {name: kernel.num_launches for name, kernel in compiled.kernels.items()}
    kv = sum(inner.kv_bytes * launches.get(name, 0) for name, inner in program.kernels.items())
    others = len(compiled.sequence.launches) - sum(launches.get(n, 0) for n in program.kernels)
    weights_s = program.weight_bytes / (card.bandwidth * MEMORY_SHARE)
    return {
        "predicted_ms": (weights_s + attention_s + others * LAUNCH_US * 1e-6) * 1e3,
        "floor_ms": (program.weight_bytes + kv) / card.bandwidth * 1e3,
    }


if __name__ == "__main__":
    main()
