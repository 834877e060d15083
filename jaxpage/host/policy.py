"""Who goes first, who gives way and how, and how much room is kept: one function each.

Other policies are other functions of the same shape; none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpage.host.sequence import SequenceGroup

MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class PressureCosts:
    """What giving way costs: `swap` moves bytes both ways, `recompute` feeds tokens again.

    The defaults are those of a 7-billion model in bfloat16 with blocks of 16 on a card with
    PCIe 4: 16 * 2 * 32 * 4096 * 2 bytes, 25 GB/s, 2 * 7e9 operations at 140e12 a second. Whoever
    knows the model and the machine gives better ones.
    """

    block_bytes: float = 8 * 2**20
    """All layers' K and V of one block."""
    link_bytes_per_s: float = 25e9
    """Between host and device, one way at a time."""
    seconds_per_token: float = 1e-4
    """Of prefill, in a step that is full."""

    def is_swap_cheaper(self, *, num_blocks: int, num_tokens: int) -> bool:
        """`num_blocks` to move out and in again, against `num_tokens` to feed again."""
        swap_s = 2 * num_blocks * self.block_bytes / self.link_bytes_per_s
        return swap_s < num_tokens * self.seconds_per_token


def rank(group: SequenceGroup) -> tuple[int, int]:
    """Smaller is served first: lower `priority`, then first come, first served.

    It must be fixed for a group's life: the lowest rank is never preempted, so it always makes
    progress, and that is why the engine cannot lock up.
    """
    return (group.request.priority, group.arrival)


def choose_victim(running: Seq[SequenceGroup]) -> SequenceGroup:
    """Who gives way when blocks run out: the last to be served. `running` is in order of rank."""
    return running[-1]


def reserved_blocks(num_running: int, group: SequenceGroup) -> int:
    """Blocks that admission leaves free: one to grow into for each row that runs or comes.

    With fewer the newcomer itself would soon give way, its prefill lost. Alone it needs none.
    Each time a group has given way doubles what it waits for, so that it cannot come and go all
    the time. vLLM keeps a fixed share of the pool; a share does not know how many rows grow.
    """
    if not num_running:
        return 0
    return (num_running + group.num_seats) << min(group.num_preemptions, MOST_DOUBLINGS)
