"""What must hold of a compiled program: rules, each with a name by which a breach is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pallas_kernels.check.cards import Card
from pallas_kernels.check.compile import Compiled, Kernel
from pallas_kernels.check.cost import occupancy
from pallas_kernels.check.program import Inner, Program

REFERENCE_POOL_BYTES = 4 * 2**30
MOST_TEMP_SHARE = 0.02
"""Most temporary memory of a step, as a share of a pool of REFERENCE_POOL_BYTES."""
TWO_PROGRAMS = 2
"""Resident programs that suffice on a small card's multiprocessor: tiles that are large enough to
hide latency leave no room for 25% of its warps."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One way in which a program breaks a rule."""

    rule: str
    program: str
    what: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A name, what it demands, and how its breaches are found."""

    name: str
    demands: str
    find: Callable[[Program, Compiled, Card], Iterator[str]]


def breaches(program: Program, compiled: Compiled, card: Card) -> list[Breach]:
    """Every rule that the compiled program breaks."""
    return [
        Breach(rule.name, program.name, what)
        for rule in RULES
        for what in rule.find(program, compiled, card)
    ]


def _inner(program: Program, compiled: Compiled) -> Iterator[tuple[str, Inner, Kernel]]:
    for name, inner in program.kernels.items():
        if name in compiled.kernels:
            yield name, inner, compiled.kernels[name]


def _is_launched(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name in program.kernels:
        if name not in compiled.kernels:
            yield f"{name} is not among {sorted(compiled.kernels)}"


def _spills(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name, kernel in compiled.kernels.items():
        if kernel.usage.spill_bytes and (name in program.kernels or not program.is_step):
            usage = kernel.usage
            yield f"{name} spills {usage.spill_bytes} bytes ({usage.registers} registers)"


def _narrow_loads(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name, inner, kernel in _inner(program, compiled):
        code = kernel.code
        wanted = inner.tile_bytes / (16 * kernel.threads)
        halves = code.loop_half_loads / 2 if inner.is_quantised else 0
        if code.loop_wide_loads + halves < wanted or code.loop_odd_loads:
            yield (
                f"{name} reads K and V with {code.loop_wide_loads} loads of 16 bytes, wanted "
                f"{wanted:g} ({code.loop_half_loads} of 8 bytes, {code.loop_word_loads} of 4, "
                f"{code.loop_odd_loads} of 1 or 2)"
            )


def _tensor_cores(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name, inner, kernel in _inner(program, compiled):
        if inner.needs_tensor_cores and not kernel.code.loop_matrix:
            yield f"{name} has no matrix instruction in its loop"


def _occupancy(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name, inner, kernel in _inner(program, compiled):
        resident, share = occupancy(kernel, card)
        is_small = card.most_warps < 64 and resident >= TWO_PROGRAMS
        if share < inner.min_occupancy and not is_small:
            yield (
                f"{name} fills {share:.0%} of a multiprocessor ({resident} programs), wanted "
                f"{inner.min_occupancy:.0%} ({kernel.usage.registers} registers, "
                f"{kernel.shared_bytes} bytes of shared memory)"
            )


def _atomics(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for name, kernel in compiled.kernels.items():
        if kernel.code.num_atomics:
            yield f"{name} has {kernel.code.num_atomics} atomic instructions"


def _grid(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    for launch in compiled.sequence.launches:
        if any(size > 65535 for size in launch.grid[1:]):
            yield f"{launch.name} has grid {launch.grid}, wanted at most 65535 in y and z"


def _aliases(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    if program.is_step and compiled.alias_bytes < program.pool_bytes:
        yield f"{compiled.alias_bytes} of {program.pool_bytes} bytes of pools are updated in place"


def _temporaries(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    most = MOST_TEMP_SHARE * REFERENCE_POOL_BYTES
    if program.is_step and compiled.temp_bytes > most:
        yield f"{compiled.temp_bytes / 2**20:.0f} MiB, wanted under {most / 2**20:.0f}"


def _copies(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    yield from compiled.copies


def _graphs(program: Program, compiled: Compiled, card: Card) -> Iterator[str]:
    sequence = compiled.sequence
    if program.is_step and (sequence.num_graphs != 1 or sequence.num_outside):
        yield f"{sequence.num_graphs} CUDA graphs and {sequence.num_outside} things outside them"


RULES = (
    Rule("kernel-launched", "every kernel named by a program is in it", _is_launched),
    Rule("no-spill", "no kernel spills registers", _spills),
    Rule("wide-loads", "K and V are read 16 bytes a thread; 8 of 8-bit pools", _narrow_loads),
    Rule("tensor-cores", "16-bit products use matrix instructions", _tensor_cores),
    Rule(
        "occupancy",
        "25% of a multiprocessor's warps, or 2 programs on a small card; 12% of float32, 8 bits "
        "and d256, and of prefill over d64 on a large card, where tiles of more warps are slower",
        _occupancy,
    ),
    Rule("no-atomics", "no kernel, the KV write included, has atomics", _atomics),
    Rule("grid-limits", "grids stay under 65536 in y and z", _grid),
    Rule("pools-aliased", "a step updates all of its pools in place", _aliases),
    Rule("small-temporaries", "a step's temporaries stay under 2% of 4 GiB", _temporaries),
    Rule("no-pool-copy", "nothing as large as a pool is copied", _copies),
    Rule("one-graph", "a step is one CUDA graph", _graphs),
)
