"""Who goes first, who gives way and how much room is kept: one function each.

Other policies are other functions of the same shape; none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxpage.host.sequence import Sequence


def rank(sequence: Sequence) -> tuple[int, ...]:
    """Smaller is served first: first come, first served. Sequence ids grow with arrival.

    It must be fixed for a sequence's life: the lowest rank is never preempted, so it always
    makes progress, and that is why the engine cannot lock up.
    """
    return (sequence.seq_id,)


def choose_victim(running: Seq[Sequence]) -> Sequence:
    """Who gives way when blocks run out: the last to be served."""
    return max(running, key=rank)


def reserved_blocks(num_running: int) -> int:
    """Blocks that admission leaves free: one to grow into for each that runs and the newcomer.

    With fewer the newcomer itself would soon give way, its prefill lost. Alone it needs none.
    vLLM keeps a fixed share of the pool; a share does not know how many sequences grow.
    """
    return num_running + 1 if num_running else 0
