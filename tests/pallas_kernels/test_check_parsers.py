"""What the compile check reads out of the tools' texts, and which rules it finds broken."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.check.cards import CARDS
from pallas_kernels.check.compile import Compiled, Kernel
from pallas_kernels.check.cost import occupancy, predict
from pallas_kernels.check.hlo import Launch, Sequence, parse_thunks, pool_copies
from pallas_kernels.check.program import Inner, Program
from pallas_kernels.check.ptxas import Usage, entry_names, parse_usage, readable
from pallas_kernels.check.rules import RULES, breaches
from pallas_kernels.check.sass import Code, parse_code

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 432 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    16 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem
"""

SASS = """\
//--------------------- .text.attend --------------------------
attend:
.text.attend:
        /*0000*/                   LDG.E.128 R4, [R12.64] ;
        /*0010*/              @!P0 LDG.E R9, [R4.64] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R48, R32.reuse, R40, RZ ;
        /*0030*/              @!P6 LDGSTS.E.BYPASS.128 [R2+0x800], [R6.64], P0 ;
        /*0040*/                   LDGSTS.E [R57], [R14.64], P1 ;
        /*0050*/              @!P1 LDG.E.U16 R3, [R14.64] ;
        /*0060*/                   LDG.E.64 R8, [R14.64] ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BRA `(.L_x_1);
        /*00a0*/                   NOP;
//--------------------- .text.add --------------------------
add:
.text.add:
        /*0000*/                   RED.E.ADD.STRONG.GPU [R2.64], R5 ;
        /*0010*/                   EXIT ;
"""

THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] scatter grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 0 bytes
    002: kCustomKernel [prev=001 (1) | sink        ] paged_decode grid: [32, 2, 70000] threads: \
[128, 1, 1]  shared_memory: 39168 bytes
001: kCopy [source | sink] kCopy
"""

HLO = """\
  %scatter = bf16[64,16,8,128]{3,2,1,0} fusion(%p0, %p1), kind=kInput, calls=%c
  %copy.1 = bf16[64,16,8,128]{3,2,1,0} copy(%p0)
  %copy.2 = bf16[32,16,8,128]{3,2,1,0} copy(%p1)
  ROOT %slice.3 = bf16[1024,8,128]{2,1,0} dynamic-slice(%p2, %i)
"""


def test_registers_and_spills_are_read_kernel_by_kernel() -> None:
    assert parse_usage(PTXAS) == {"first": Usage(96, 0, 0), "second": Usage(255, 48, 512)}


def test_a_text_without_registers_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted registers"):
        parse_usage("ptxas info : Compiling entry function 'x' for 'sm_80'\nfatal\n")


def test_newer_ptx_is_lowered_and_older_kept() -> None:
    assert readable("//\n.version 9.0\n.target sm_90a\n") == "//\n.version 8.8\n.target sm_90a\n"
    assert readable(".version 8.4\n") == ".version 8.4\n"
    assert entry_names(".visible .entry paged_decode(\n") == ["paged_decode"]


def test_the_loop_and_its_loads_are_counted() -> None:
    code = parse_code(SASS)
    attend = code["attend"]
    assert attend.loop_instructions == 6
    assert (attend.loop_wide_loads, attend.loop_half_loads) == (1, 1)
    assert (attend.loop_word_loads, attend.loop_odd_loads) == (1, 1)
    assert (attend.num_matrix, attend.loop_matrix, attend.num_atomics) == (1, 1, 0)
    assert attend.num_instructions == 10
    assert code["add"].num_atomics == 1
    assert code["add"].loop_instructions == 0


def test_launches_and_graphs_are_read() -> None:
    sequence = parse_thunks(THUNKS)
    assert (sequence.num_graphs, sequence.num_outside) == (1, 1)
    assert [launch.name for launch in sequence.launches] == ["scatter", "paged_decode"]
    assert sequence.launches[1] == Launch("paged_decode", (32, 2, 70000), 128, 39168)


def test_only_what_is_as_large_as_a_pool_is_a_copy() -> None:
    found = pool_copies(HLO, [("bf16", 64 * 16 * 8 * 128)])
    assert [line.split()[0] for line in found] == ["%copy.1", "ROOT"]
    assert not pool_copies(HLO, [("f32", 64 * 16 * 8 * 128)])


POOL = jax.ShapeDtypeStruct((64, 16, 8, 128), jnp.bfloat16)
INNER = Inner(tile_bytes=32768, turns=1024, kv_bytes=2**25, operations=2**27, num_stages=3)
CODE = Code(700, 32, 0, 400, 32, 16, 0, 0, 1)
KERNEL = Kernel(Usage(96, 0, 0), CODE, (8, 2, 32), 128, 39168, 1)
PROGRAM = Program("p", max, (), kernels={"k": INNER}, pools=(POOL, POOL), is_step=True)
SOUND = Compiled(
    Sequence((Launch("k", (8, 2, 32), 128, 39168),), 1, 0),
    {"k": KERNEL},
    alias_bytes=PROGRAM.pool_bytes,
    temp_bytes=2**20,
    copies=(),
    compile_s=1.0,
)


def test_a_sound_program_breaks_no_rule() -> None:
    assert breaches(PROGRAM, SOUND, CARDS["a100"]) == []


BROKEN = {
    "kernel-launched": replace(SOUND, kernels={}),
    "no-spill": replace(SOUND, kernels={"k": replace(KERNEL, usage=Usage(96, 8, 0))}),
    "wide-loads": replace(
        SOUND, kernels={"k": replace(KERNEL, code=replace(CODE, loop_wide_loads=15))}
    ),
    "tensor-cores": replace(
        SOUND, kernels={"k": replace(KERNEL, code=replace(CODE, loop_matrix=0))}
    ),
    "occupancy": replace(SOUND, kernels={"k": replace(KERNEL, shared_bytes=80000)}),
    "no-atomics": replace(SOUND, kernels={"k": replace(KERNEL, code=replace(CODE, num_atomics=1))}),
    "grid-limits": replace(SOUND, sequence=Sequence((Launch("k", (1, 65536, 1), 1, 0),), 1, 0)),
    "pools-aliased": replace(SOUND, alias_bytes=PROGRAM.pool_bytes - 1),
    "small-temporaries": replace(SOUND, temp_bytes=2**30),
    "no-pool-copy": replace(SOUND, copies=("copy",)),
    "one-graph": replace(SOUND, sequence=Sequence(SOUND.sequence.launches, 1, 1)),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_alone_is_broken_by_its_own_fault(rule: str) -> None:
    assert [breach.rule for breach in breaches(PROGRAM, BROKEN[rule], CARDS["a100"])] == [rule]


def test_occupancy_follows_the_scarcest_resource() -> None:
    assert occupancy(KERNEL, CARDS["a100"]) == (4, 0.25)
    assert occupancy(KERNEL, CARDS["a10g"]) == (2, pytest.approx(8 / 48))
    assert occupancy(replace(KERNEL, usage=Usage(255, 0, 0)), CARDS["h200"])[0] == 2


def test_the_model_never_beats_the_roofline_and_sees_issue_slots() -> None:
    card = CARDS["a100"]
    cost = predict(KERNEL, INNER, card)
    assert cost.total_s > cost.floor_s > 0
    slow = replace(KERNEL, code=replace(CODE, loop_instructions=40000))
    assert predict(slow, INNER, card).total_s > 10 * cost.total_s
