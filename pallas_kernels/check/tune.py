"""Compares tiles: compiles candidates and ranks them by the rules they keep and the cost model.

It only prints: the table in `pallas_kernels.config` is written by hand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from pallas_kernels.check.cards import Card
from pallas_kernels.check.compile import compile_for
from pallas_kernels.check.cost import occupancy, predict
from pallas_kernels.check.rules import breaches
from pallas_kernels.check.shapes import MODELS, VARIANTS, decode, prefill
from pallas_kernels.config import Kind, Tuning

GRIDS: dict[Kind, tuple[tuple[int, ...], ...]] = {  # block_k, query_rows, num_warps, num_stages
    "decode": ((16, 32, 64, 128), (16,), (2, 4, 8), (2, 3, 4)),
    "prefill": ((16, 32, 64), (32, 64, 128), (4, 8), (1, 2, 3)),
}
MAKERS = {"decode": decode, "prefill": prefill}


def print_candidates(card: Card, *, only: str) -> None:
    """For every model whose "KIND NAME" matches `only`: candidates, best first."""
    for kind, heads in itertools.product(GRIDS, MODELS + VARIANTS):
        if not re.search(only, f"{kind} {heads.name}"):
            continue
        table = heads.tuning(kind, card)
        print(f"\n{card.name} {kind} {heads.name}: block_k, query_rows, warps, stages; now {table}")
        lines = []
        for tuning in _candidates(kind, table):
            program = MAKERS[kind](heads, card, tuning=tuning)
            compiled = compile_for(program, card)
            for name, inner in program.kernels.items():
                kernel = compiled.kernels[name]
                broken = [breach.rule for breach in breaches(program, compiled, card)]
                us = predict(kernel, inner, card).total_s * 1e6
                shape = (tuning.block_k, tuning.query_rows, tuning.num_warps, tuning.num_stages)
                lines.append(
                    (
                        len(broken),
                        us,
                        f"{shape!s:20} {us:8.1f} us  {kernel.usage.registers:3} registers "
                        f"{kernel.usage.spill_bytes:5} spilled {kernel.shared_bytes / 1024:6.1f} K "
                        f"{occupancy(kernel, card)[1]:4.0%}  {' '.join(broken)}",
                    )
                )
        for *_, line in sorted(lines):
            print(line)


def _candidates(kind: Kind, table: Tuning) -> Iterator[Tuning]:
    for block_k, query_rows, num_warps, num_stages in itertools.product(*GRIDS[kind]):
        yield replace(
            table,
            block_k=block_k,
            query_rows=query_rows,
            num_warps=num_warps,
            num_stages=num_stages,
        )
