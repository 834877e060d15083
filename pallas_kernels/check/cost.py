"""Predicts a kernel's time from what was compiled: bytes, reads in flight, issue slots, waves.

A model to compare tiles with, not a measurement. Its constants are printed with every table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.check.cards import Card
from pallas_kernels.check.compile import Kernel
from pallas_kernels.check.program import Inner

MEMORY_SHARE = 0.92
"""Share of the maker's bandwidth that a copy reaches."""
MEMORY_LATENCY_NS = {8: 600.0, 9: 750.0}
"""Time from a read to its data under load, by generation (the major compute capability)."""
ISSUE_SLOTS = 4
"""Instructions a cycle of one multiprocessor, one a scheduler."""
ISSUE_SHARE = 0.7
"""Share of the issue slots that a loop with its waits can use."""
MATRIX_SHARE = 0.65
"""Share of the maker's matrix rate that a loop of products with softmaxes between them can use."""
LAUNCH_US = 2.0
"""Time that each launch in a CUDA graph adds: the gap between two kernels, and start and end."""

CONSTANTS = (
    f"memory {MEMORY_SHARE:.0%} of nominal, latency {MEMORY_LATENCY_NS[8]:.0f} ns (sm_8x), "
    f"{MEMORY_LATENCY_NS[9]:.0f} ns (sm_9x), {ISSUE_SLOTS} instructions a cycle at "
    f"{ISSUE_SHARE:.0%}, {MATRIX_SHARE:.0%} of the matrix rate, {LAUNCH_US:.1f} us a launch"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that one launch takes by each limit, and in all (`total_s`)."""

    floor_s: float
    """The larger of KV bytes over nominal bandwidth and operations over the nominal rate."""
    memory_s: float
    issue_s: float
    matrix_s: float
    total_s: float

    @property
    def ratio(self) -> float:
        """Predicted time over the floor; 1 is perfect."""
        return self.total_s / self.floor_s if self.floor_s else math.inf


def occupancy(kernel: Kernel, card: Card) -> tuple[int, float]:
    """(programs that a multiprocessor holds at once, their share of the warps that it can hold)."""
    warps = -(-kernel.threads // 32)
    resident = card.resident_programs(
        registers=kernel.usage.registers, warps=warps, shared_bytes=kernel.shared_bytes
    )
    return resident, resident * warps / card.most_warps


def predict(kernel: Kernel, inner: Inner, card: Card) -> Cost:
    """The cost of one launch.

    Programs run in waves of as many as the card holds at once. Those of a last, partial wave share
    all of the bandwidth, but use no more than their own reads in flight allow; arithmetic takes as
    long as on the multiprocessor with the most programs.
    """
    resident, _ = occupancy(kernel, card)
    mps = card.num_multiprocessors
    programs, warps = math.prod(kernel.grid), -(-kernel.threads // 32)
    together = min(programs, max(1, resident) * mps)
    rest = programs % together
    latency = MEMORY_LATENCY_NS[card.capability[0]] * 1e-9
    a_program = max(1, inner.num_stages - 1) * inner.tile_bytes / latency

    def read_s(share: float, at_once: int) -> float:
        from_memory = share * inner.kv_bytes / (card.bandwidth * MEMORY_SHARE)
        return max(from_memory, share * inner.turns * inner.tile_bytes / (at_once * a_program))

    memory_s = read_s(1 - rest / programs, together) + (
        read_s(rest / programs, rest) if rest else 0
    )
    outside = kernel.code.num_instructions - kernel.code.loop_instructions
    issued = warps * (inner.turns * kernel.code.loop_instructions + programs * outside)
    uneven = -(-programs // mps) * mps / programs
    issue_s = uneven * issued / (mps * ISSUE_SLOTS * ISSUE_SHARE * card.clock_ghz * 1e9)
    matrix_s = uneven * inner.operations / (card.matmul_rate * MATRIX_SHARE)
    return Cost(
        floor_s=max(inner.kv_bytes / card.bandwidth, inner.operations / card.matmul_rate),
        memory_s=memory_s,
        issue_s=issue_s,
        matrix_s=matrix_s,
        total_s=max(memory_s, issue_s, matrix_s) + LAUNCH_US * 1e-6,
    )
