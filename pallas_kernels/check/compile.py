"""Compiles a program for a card that is not there, and reads what the compiler made of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels._compat import lowering_for
from pallas_kernels.check.cards import Card
from pallas_kernels.check.hlo import Sequence, parse_thunks, pool_copies
from pallas_kernels.check.program import Program
from pallas_kernels.check.ptxas import Usage, assemble, entry_names
from pallas_kernels.check.sass import Code, parse_code

HLO_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "int8": "s8",
    "float8_e4m3fn": "f8e4m3fn",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel of a program."""

    usage: Usage
    code: Code
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    num_launches: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One program, compiled."""

    sequence: Sequence
    kernels: Mapping[str, Kernel]
    """Each kernel that is launched, by name."""
    alias_bytes: int
    """Outputs that share the memory of an input."""
    temp_bytes: int
    copies: tuple[str, ...]
    """Instructions that copy a pool, as HLO's text."""
    compile_s: float


def compile_for(program: Program, card: Card) -> Compiled:
    """Compiles `program` for `card` in this process, whose own backend does not matter."""
    start = time.perf_counter()
    with TemporaryDirectory(prefix="pallas_kernels_check_") as place:
        with lowering_for(card.target, card.device_kind):
            lowered = _lower(program, card)
        options: dict[str, Any] = {"xla_dump_to": place, "xla_dump_emitter_re": "ptx"}
        compiled = lowered.compile(compiler_options=options)
        folder = Path(place)
        sequence = _read_sequence(folder)
        kernels = _read_kernels(folder, sequence)
    memory = compiled.memory_analysis()
    assert memory is not None
    pools = [(HLO_DTYPES[pool.dtype.name], pool.size) for pool in program.pools]
    return Compiled(
        sequence=sequence,
        kernels=kernels,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copies=tuple(pool_copies(compiled.as_text() or "", pools)),
        compile_s=time.perf_counter() - start,
    )


def _lower(program: Program, card: Card) -> Any:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=card.description(), topology="1x1x1"
    )
    where = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    arguments = jax.tree.map(placed, program.arguments)
    return jax.jit(program.function, donate_argnums=program.donated).lower(*arguments)


def _read_sequence(folder: Path) -> Sequence:
    found = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt")) or sorted(
        folder.glob("*thunk_sequence.txt")  # no pass changed anything
    )
    if not found:
        raise RuntimeError(f"XLA wrote no thunk sequence among {len(list(folder.iterdir()))} files")
    return parse_thunks(found[-1].read_text(encoding="utf-8"))


def _read_kernels(folder: Path, sequence: Sequence) -> dict[str, Kernel]:
    """Each Pallas kernel and fusion that is launched, by name, assembled as XLA would do it."""
    counts = Counter(launch.name for launch in sequence.launches)
    launches = {launch.name: launch for launch in sequence.launches}
    kernels: dict[str, Kernel] = {}
    for ptx in sorted(folder.glob("*.ptx")):
        names = [name for name in entry_names(ptx.read_text(encoding="utf-8")) if name in launches]
        if not names:
            continue
        usage, disassembly = assemble(ptx, folder)
        code = parse_code(disassembly)
        for name in names:
            launch = launches[name]
            kernels[name] = Kernel(
                usage=usage[name],
                code=code[name],
                grid=launch.grid,
                threads=launch.threads,
                shared_bytes=launch.shared_bytes + usage[name].static_shared_bytes,
                num_launches=counts[name],
            )
    return kernels
