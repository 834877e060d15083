"""Which group gives up its blocks when they run out, and how: freed, or moved to the host.

Knows no row and no token budget. A group is preempted as a whole, and only for one that is served
before it, so the first to be served always goes on.

    running, in order of rank    A     B     C     D         9 blocks, none free, all plans read
    tables                       3     3     2     1         the last blocks of A, B, C are full
    A needs a block              D is preempted, A takes its block
    B needs a block              C is preempted, B takes one of its two
    C, D                         wait, in this order, and keep their tokens; one block is free
"""

from __future__ import annotations

from jaxpage.host import policy
from jaxpage.host.sequence import SequenceGroup, Status
from jaxpage.host.state import State


class Preemptor:
    """Makes room for the plan being made."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.is_short = False
        """Blocks have run out in this plan, so it admits no further group."""

    def make_room(self, group: SequenceGroup, num_blocks: int) -> bool:
        """Whether so many blocks are free for the group, after others were preempted for it.

        False leaves it out of this plan: it waits for held blocks, or for the groups before it.
        """
        state = self._state
        while state.blocks.num_free < num_blocks:
            self.is_short = True
            if state.blocks.num_held:
                return False
            victim = policy.choose_victim(state.queues.running)
            if victim is group or not preempt(state, victim):
                return False
        return True


def preempt(state: State, group: SequenceGroup) -> bool:
    """Takes a running group's blocks; it waits again.

    False: not now, as its beams await a choice that may fork them, or this plan brings it back
    from the host.
    """
    if group.swapped_in_for == state.last_planned + 1:
        return False
    is_in_flight = state.is_in_flight(group)
    if group.beams is not None and is_in_flight:
        return False
    running = [sequence for sequence in group.live if sequence.status is Status.RUNNING]
    seq_ids = [sequence.seq_id for sequence in running]
    num_computed = sum(sequence.num_computed for sequence in running)
    is_swap = _is_swap(state, group, seq_ids, num_computed)
    group.num_preemptions += 1
    state.queues.stop(group)
    if is_swap:
        until_step = group.last_step if is_in_flight else None
        num_moved = state.blocks.swap_out(seq_ids, until_step=until_step)
        state.counters.swapped_out_blocks += num_moved
        for sequence in running:
            sequence.status = Status.SWAPPED
        state.counters.preemptions_swap += 1
    else:
        state.free_group(group)
        state.counters.preemptions_recompute += 1
    state.queues.waiting.push(group)
    return True


def _is_swap(state: State, group: SequenceGroup, seq_ids: list[int], num_computed: int) -> bool:
    """As configured and as the host has room; `auto` is the cheaper of the two."""
    mode, cache = state.config.preemption, state.cache
    if mode == "recompute" or not cache.num_swap_blocks:
        return False
    num_blocks = state.blocks.num_to_swap_out(seq_ids)
    if not num_blocks or not state.blocks.can_swap_out(seq_ids):
        return False
    if mode == "swap":
        return True
    # What a hit brought is likely to be found again; what samples share is computed once.
    num_tokens = min(num_blocks * cache.block_size, num_computed)
    num_tokens -= group.num_cached_tokens or 0
    return state.costs.is_swap_cheaper(num_blocks=num_blocks, num_tokens=num_tokens)
