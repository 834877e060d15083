"""Which group is served first, which is preempted and how, and how much room is kept.

A function each; other policies are other functions of the same shape. None changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpage.host.sequence import SequenceGroup

MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What preemption costs: `swap` moves bytes both ways, `recompute` feeds tokens again.

    The defaults are those of a 7-billion model in bfloat16 with blocks of 16 on a card with
    PCIe 4: 16 * 2 * 32 * 4096 * 2 bytes, 25 GB/s, 2 * 7e9 operations at 140e12 a second. The
    engine gives those of its model and machine.
    """

    block_bytes: float = 8 * 2**20
    """All layers' K and V of one block."""
    link_bytes_per_s: float = 25e9
    """Between host and device, one way at a time."""
    seconds_per_token: float = 1e-4
    """Seconds of prefill a token, in a step that is full."""

    def is_swap_cheaper(self, *, num_blocks: int, num_tokens: int) -> bool:
        """`num_blocks` to move out and in again, against `num_tokens` to feed again."""
        swap_s = 2 * num_blocks * self.block_bytes / self.link_bytes_per_s
        return swap_s < num_tokens * self.seconds_per_token


def rank(group: SequenceGroup) -> tuple[int, int]:
    """Smaller is served first: lower `priority`, then first come, first served.

    It must not change while a group lives: the group of the lowest rank is never preempted, so it
    always makes progress, and so the engine never locks up.
    """
    return (group.request.priority, group.arrival)


def choose_victim(running: Seq[SequenceGroup]) -> SequenceGroup:
    """The group to preempt: the last to be served. `running` is in order of rank."""
    return running[-1]


def reserved_blocks(num_running: int, group: SequenceGroup) -> int:
    """Blocks that admission leaves free: one to grow into for each running row and each new one.

    With fewer the new group would soon be preempted itself, its prefill lost. Alone it needs none.
    Each preemption doubles what the group waits for, so that it does not come and go all the time.
    vLLM keeps a fixed share of the pool, which does not depend on how many rows grow.
    """
    if not num_running:
        return 0
    return (num_running + group.num_rows_needed) << min(group.num_preemptions, MOST_DOUBLINGS)
