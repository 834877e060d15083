"""Who gives way when blocks run out, and by which of the two ways: freed, or moved to the host.

Knows no row and no budget. A group gives way as a whole, and only for one that is served before
it: the first to be served always goes on.

    running, first to last    A     B     C     D         9 blocks, none free, all read
    tables                    3     3     2     1         A's, B's and C's blocks are full
    A needs a block           D gives way, A takes its block
    B needs a block           C gives way, B takes one of its two
    C, D                      wait in this order, with the tokens they have; one block is free
"""

from __future__ import annotations

from jaxpage.host import policy
from jaxpage.host.sequence import SequenceGroup, Status
from jaxpage.host.state import Books


class Pressure:
    """Makes room, by making others wait."""

    def __init__(self, books: Books, costs: policy.PressureCosts) -> None:
        self._books = books
        self._costs = costs
        self._preempted: list[int] = []
        self.is_short = False
        """Somebody did not get his blocks in the plan being made: nobody may join in it."""

    def make_room(self, group: SequenceGroup, num_blocks: int) -> bool:
        """Whether so many blocks are free for the group, after others have given way for it.

        False leaves it out of this step: it waits for held blocks, or for those before it.
        """
        books = self._books
        while books.blocks.num_free < num_blocks:
            self.is_short = True
            if books.blocks.num_held:
                return False
            victim = policy.choose_victim(books.running)
            if victim is group or not self._preempt(victim):
                return False
        return True

    def take_preempted(self) -> tuple[int, ...]:
        """The sequences that gave way since the last plan."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def _preempt(self, group: SequenceGroup) -> bool:
        """False: not yet, for its beams await a choice that may fork them, or it has just come."""
        books = self._books
        if group.returned_for == books.last_planned + 1:
            return False
        is_swap = self._is_swap(group)
        if group.beams is not None and books.is_in_flight(group):
            return False
        running = [s for s in group.live if s.status is Status.RUNNING]
        self._preempted += [sequence.seq_id for sequence in running]
        group.num_preemptions += 1
        books.stop(group)
        if is_swap:
            until_step = group.last_step if books.is_in_flight(group) else None
            seq_ids = [sequence.seq_id for sequence in running]
            books.counters.swapped_out_blocks += books.blocks.swap_out(
                seq_ids, until_step=until_step
            )
            for sequence in running:
                sequence.status = Status.SWAPPED
            books.counters.preemptions_swap += 1
        else:
            books.forget_blocks(group)
            books.counters.preemptions_recompute += 1
        books.waiting.push(group)
        return True

    def _is_swap(self, group: SequenceGroup) -> bool:
        """As configured, and as the host has room; `auto` is the cheaper."""
        blocks, mode = self._books.blocks, self._books.config.preemption
        if mode == "recompute" or not self._books.cache.num_swap_blocks:
            return False
        running = [s for s in group.live if s.status is Status.RUNNING]
        seq_ids = [sequence.seq_id for sequence in running]
        num_blocks = blocks.num_to_swap_out(seq_ids)
        if not num_blocks or not blocks.can_swap_out(seq_ids):
            return False
        if mode == "swap":
            return True
        # What a hit brought is likely to be found again; what samples share is fed once.
        size = self._books.cache.block_size
        num_tokens = min(num_blocks * size, sum(s.num_computed for s in running))
        num_tokens -= group.num_cached_tokens or 0
        return self._costs.is_swap_cheaper(num_blocks=num_blocks, num_tokens=num_tokens)
