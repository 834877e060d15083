"""Prints what the check found: a table for each card, then the rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pallas_kernels.check.cards import Card
from pallas_kernels.check.rules import RULES

HEADER = (
    f"{'program':24}{'kernel':22}{'grid':>16} {'regs':>5}{'spill':>6}{'smem':>7}{'occ':>5}"
    f"{'16B':>4}{'4B':>4}{'mma':>5}{'loop':>6}{'atom':>5}{'model':>9}{'floor':>9}{'ratio':>6}"
)


def print_target(card: Card, rows: list[dict[str, Any]]) -> None:
    """One card's table: the attention kernels of each program, then its whole steps."""
    print(f"\n{card.name} ({card.arch}, {card.num_multiprocessors} multiprocessors)\n{HEADER}")
    for row in rows:
        for kernel in row.get("kernels", ()):
            if kernel["is_attention"] or (not row["is_step"] and "fusion" not in kernel["name"]):
                print(_kernel_line(row["program"], kernel))
    for row in rows:
        if row.get("is_step"):
            print(
                f"{row['program']}: {row['graphs']} graph(s), {row['outside']} outside, "
                f"{row['launches']} launches; aliased {row['alias_bytes'] / 2**20:.0f} of "
                f"{row['pool_bytes'] / 2**20:.0f} MiB, temporaries "
                f"{row['temp_bytes'] / 2**20:.1f} MiB, {row['copies']} pool copies; model "
                f"{row['predicted_ms']:.2f} ms, floor {row['floor_ms']:.2f} ms"
            )
    seconds = sum(row.get("compile_s", 0.0) for row in rows)
    print(f"{len(rows)} programs in {seconds:.0f} s", flush=True)


def print_rules(results: dict[str, list[dict[str, Any]]]) -> int:
    """Prints the rules and each breach of one; returns the number of breaches."""
    found = [
        (breach["rule"], target, row["program"], breach["what"])
        for target, rows in results.items()
        for row in rows
        for breach in row["breaches"]
    ]
    counts = Counter(rule for rule, *_ in found)
    demands = {rule.name: rule.demands for rule in RULES} | {"compiles": "everything compiles"}
    for name, demand in demands.items():
        verdict = "BROKEN" if counts[name] else "holds"
        print(f"{name:18} {verdict:7} {demand}")
    for rule, target, program, what in found:
        print(f"BROKEN {rule}: {target}, {program}: {what}")
    return len(found)


def _kernel_line(program: str, kernel: dict[str, Any]) -> str:
    grid = "x".join(map(str, kernel["grid"]))
    line = (
        f"{program:24}{kernel['name'][:21]:22}{grid:>16} {kernel['registers']:5}"
        f"{kernel['spill_bytes']:6}{kernel['shared_bytes'] / 1024:6.1f}K{kernel['occupancy']:5.0%}"
        f"{kernel['loop_wide_loads']:4}{kernel['loop_word_loads']:4}{kernel['loop_matrix']:5}"
        f"{kernel['loop_instructions']:6}{kernel['atomics']:5}"
    )
    if "predicted_us" not in kernel:
        return line
    ratio = kernel["predicted_us"] / kernel["floor_us"]
    return f"{line}{kernel['predicted_us']:7.0f}us{kernel['floor_us']:7.0f}us{ratio:6.2f}"
