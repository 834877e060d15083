"""How a waiting group comes to run: what it finds in the prefix cache, and who follows whom.

Takes blocks, makes no row. A group of samples or beams that gave way is fed again as the tree it
is, so that it needs no more blocks than before: block_size 4, of three beams, sorted,

    s0  a b c d e f g h i        opens a table for all its tokens
    s1  a b c d e f g x y        led by s0: takes over 1 block once s0 has computed 4 tokens
    s2  a b p q                  led by s1: 0 blocks: opens a table by itself
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

from jaxpage.host import policy
from jaxpage.host.prefix_cache import PrefixHit
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.host.state import Books


class Admission:
    """Brings waiting groups in, in order of rank; nobody overtakes one who does not fit."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def admit_next(self) -> SequenceGroup | None:
        """The group that waits first, running now with its table open; None: it must wait."""
        books, group = self._books, self._books.waiting.first()
        if group is None or books.is_in_flight(group):
            return None
        num_running = sum(other.num_seats for other in books.running)
        if num_running + group.num_seats > books.config.max_num_seqs:
            return None
        if books.running and books.blocks.num_free < group.retry_free_blocks:
            return None
        reserve = policy.reserved_blocks(num_running, group)
        is_swapped = any(sequence.status is Status.SWAPPED for sequence in group.live)
        if not (self._swap_in(group, reserve) if is_swapped else self._begin(group, reserve)):
            return None
        group.retry_free_blocks = 0
        books.start(group)
        return group

    def follow(self, sequence: Sequence) -> int:
        """Blocks that it takes to let a waiting sequence follow its leader."""
        return self._books.blocks.num_needed(len(sequence.token_ids), self._led_hit(sequence))

    def is_led(self, sequence: Sequence) -> bool:
        """Whether all that a waiting sequence takes over has been computed."""
        leader, size = sequence.leader, self._books.cache.block_size
        if leader is not None and leader.status in (Status.LEAVING, Status.ENDED):
            leader = sequence.leader = None  # its blocks are gone: begin alone
        return leader is None or (
            leader.status is Status.RUNNING
            and leader.num_computed >= sequence.num_led_blocks * size
        )

    def open_led(self, sequence: Sequence) -> None:
        """The sequence takes over its leader's blocks; there must be room for the others."""
        self._open(sequence, self._led_hit(sequence))

    def _begin(self, group: SequenceGroup, reserve: int) -> bool:
        """Opens the first table, and says who follows whom."""
        books, blocks = self._books, self._books.blocks
        starting = [s for s in group.live if s.status is Status.WAITING]
        if group.is_one_row:
            starting = starting[:1]
        _line_up(starting, books.cache.block_size)
        first, size = starting[0], books.cache.block_size
        followers = sum(
            books.cache.blocks_for(s.num_to_prefill) - s.num_led_blocks for s in starting[1:]
        )
        hit = self._hit(first)
        need = blocks.num_needed(first.num_to_prefill, hit) + followers
        if need + reserve > blocks.num_free:
            group.retry_free_blocks = min(need + reserve, blocks.num_free + 1)
            return False
        self._open(first, hit)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = hit.num_tokens
            books.counters.prefix_hit_tokens += hit.num_tokens
            books.counters.prompt_tokens += first.prompt_len
        assert first.num_computed % size == 0, first
        return True

    def _swap_in(self, group: SequenceGroup, reserve: int) -> bool:
        books, blocks = self._books, self._books.blocks
        swapped = [s for s in group.live if s.status is Status.SWAPPED]
        seq_ids = [sequence.seq_id for sequence in swapped]
        need = blocks.num_needed_to_swap_in(seq_ids)
        for sequence in swapped:
            if sequence.is_prefilling:
                stored = books.cache.blocks_for(sequence.num_computed)
                need += books.cache.blocks_for(sequence.prefill_len) - stored
        if need + reserve > blocks.num_free:
            return False
        blocks.swap_in(seq_ids)
        group.returned_for = books.last_planned + 1
        for sequence in swapped:
            sequence.status = Status.RUNNING
            if sequence.is_prefilling:
                blocks.prepare_write(sequence.seq_id, sequence.prefill_len - sequence.num_computed)
        return True

    def _open(self, sequence: Sequence, hit: PrefixHit) -> None:
        sequence.status = Status.RUNNING
        sequence.prefill_len = sequence.num_to_prefill
        sequence.num_computed = hit.num_tokens
        sequence.leader = None
        self._books.blocks.open(sequence.seq_id, sequence.prefill_len, hit)

    def _hit(self, sequence: Sequence) -> PrefixHit:
        """What the cache has of its tokens; nothing for one whose prompt is still to be scored."""
        request, blocks = sequence.group.request, self._books.blocks
        if sequence.group.prompt_logprobs is not None:
            return PrefixHit(request.namespace)
        most = min(sequence.num_to_prefill, len(sequence.token_ids) - 1)
        return blocks.match(sequence.token_ids, request.namespace, most_tokens=most)

    def _led_hit(self, sequence: Sequence) -> PrefixHit:
        """The leader's blocks: by the prefix cache, where there is one, as it holds them too."""
        leader, size = sequence.leader, self._books.cache.block_size
        if leader is None or self._books.config.enable_prefix_caching:
            return self._hit(sequence)
        taken = self._books.blocks.table(leader.seq_id)[: sequence.num_led_blocks]
        return PrefixHit(block_ids=taken, num_tokens=len(taken) * size)


def _line_up(starting: list[Sequence], block_size: int) -> None:
    """Sorts sequences: each shares most with the one before it, and that becomes its leader."""
    starting.sort(key=lambda sequence: sequence.token_ids)
    for leader, sequence in pairwise(starting):
        shared = common_length(leader.token_ids, sequence.token_ids)
        sequence.leader = leader
        sequence.num_led_blocks = min(shared, sequence.num_to_prefill - 1) // block_size


def common_length(one: Seq[int], other: Seq[int]) -> int:
    """How many leading entries two sequences share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length  # the first `low` agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
