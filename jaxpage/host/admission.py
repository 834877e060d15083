"""How a waiting group comes to run: cached blocks, blocks taken over, blocks back from the host.

Takes blocks, makes no row. A group of samples or beams that was preempted is prefilled as the tree
it is, so that it needs no more blocks than before: block_size 4, three beams, sorted by tokens,

    s0  a b c d e f g h i        a table for all its tokens
    s1  a b c d e f g x y        prefix parent s0: takes over 1 block once s0 has computed 4 tokens
    s2  a b p q                  prefix parent s1: takes over 0 blocks
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

from jaxpage.host import policy
from jaxpage.host.prefix_cache import PrefixHit
from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.host.state import State


def admit_next(state: State) -> SequenceGroup | None:
    """The group that waits first, running now with its first table open; None: it must wait.

    Strictly in order of rank: where the first does not fit, no other is tried.
    """
    running, blocks, group = state.queues.running, state.blocks, state.queues.waiting.first()
    if group is None or state.is_in_flight(group):
        return None
    num_running = sum(other.num_rows_needed for other in running)
    if num_running + group.num_rows_needed > state.config.max_num_seqs:
        return None
    if running and blocks.num_free < group.retry_free_blocks:
        return None
    reserve = policy.reserved_blocks(num_running, group)
    is_swapped = any(sequence.status is Status.SWAPPED for sequence in group.live)
    admit = _swap_in if is_swapped else _begin
    if not admit(state, group, reserve):
        return None
    group.retry_free_blocks = 0
    state.queues.start(group)
    return group


def can_resume(state: State, sequence: Sequence) -> bool:
    """Whether all that a waiting sequence takes over has been computed."""
    parent, size = sequence.prefix_parent, state.cache.block_size
    if parent is not None and parent.status in (Status.FINISHING, Status.FINISHED):
        parent = sequence.prefix_parent = None  # its blocks are gone
    return parent is None or (
        parent.status is Status.RUNNING
        and parent.num_computed >= sequence.num_inherited_blocks * size
    )


def blocks_to_resume(state: State, sequence: Sequence) -> int:
    """Blocks that `resume` takes."""
    return state.blocks.num_needed(len(sequence.token_ids), _inherited(state, sequence))


def resume(state: State, sequence: Sequence) -> None:
    """Opens a waiting sequence's table, with the blocks it takes over; the others must be free."""
    _open(state, sequence, _inherited(state, sequence))


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


def _begin(state: State, group: SequenceGroup, reserve: int) -> bool:
    """Opens the first sequence's table, where all of the group fit, and finds prefix parents."""
    cache, blocks = state.cache, state.blocks
    starting = [sequence for sequence in group.live if sequence.status is Status.WAITING]
    if group.is_one_row:
        starting = starting[:1]
    _find_prefix_parents(starting, cache.block_size)
    first, *others = starting
    need_of_others = sum(
        cache.blocks_for(sequence.num_to_prefill) - sequence.num_inherited_blocks
        for sequence in others
    )
    hit = _cached(state, first)
    need = blocks.num_needed(first.num_to_prefill, hit) + need_of_others
    if need + reserve > blocks.num_free:
        group.retry_free_blocks = min(need + reserve, blocks.num_free + 1)
        return False
    _open(state, first, hit)
    if group.num_cached_tokens is None:
        group.num_cached_tokens = hit.num_tokens
        state.counters.prefix_hit_tokens += hit.num_tokens
        state.counters.prompt_tokens += first.prompt_len
    assert first.num_computed % cache.block_size == 0, first
    return True


def _swap_in(state: State, group: SequenceGroup, reserve: int) -> bool:
    """Brings the group's tables back from the host, where there is room to go on prefilling."""
    cache, blocks = state.cache, state.blocks
    swapped = [sequence for sequence in group.live if sequence.status is Status.SWAPPED]
    seq_ids = [sequence.seq_id for sequence in swapped]
    need = blocks.num_needed_to_swap_in(seq_ids)
    for sequence in swapped:
        if sequence.is_prefilling:
            num_stored = cache.blocks_for(sequence.num_computed)
            need += cache.blocks_for(sequence.prefill_len) - num_stored
    if need + reserve > blocks.num_free:
        return False
    blocks.swap_in(seq_ids)
    group.swapped_in_for = state.last_planned + 1
    for sequence in swapped:
        sequence.status = Status.RUNNING
        if sequence.is_prefilling:
            blocks.prepare_write(sequence.seq_id, sequence.prefill_len - sequence.num_computed)
    return True


def _open(state: State, sequence: Sequence, hit: PrefixHit) -> None:
    sequence.status = Status.RUNNING
    sequence.prefill_len = sequence.num_to_prefill
    sequence.num_computed = hit.num_tokens
    sequence.prefix_parent = None
    state.blocks.open(sequence.seq_id, sequence.prefill_len, hit)


def _cached(state: State, sequence: Sequence) -> PrefixHit:
    """What the cache has of its tokens; nothing while its prompt's log-probabilities are due."""
    request = sequence.group.request
    if sequence.group.prompt_logprobs is not None:
        return PrefixHit(request.namespace)
    most = min(sequence.num_to_prefill, len(sequence.token_ids) - 1)
    return state.blocks.match(sequence.token_ids, request.namespace, most_tokens=most)


def _inherited(state: State, sequence: Sequence) -> PrefixHit:
    """The prefix parent's leading blocks; a prefix cache has these too, and knows more."""
    parent = sequence.prefix_parent
    if parent is None or state.config.enable_prefix_caching:
        return _cached(state, sequence)
    block_ids = state.blocks.table(parent.seq_id)[: sequence.num_inherited_blocks]
    return PrefixHit(block_ids=block_ids, num_tokens=len(block_ids) * state.cache.block_size)


def _find_prefix_parents(starting: list[Sequence], block_size: int) -> None:
    """Sorts sequences by their tokens: each shares most with the one before, now its parent."""
    starting.sort(key=lambda sequence: sequence.token_ids)
    for parent, sequence in pairwise(starting):
        shared = common_length(parent.token_ids, sequence.token_ids)
        sequence.prefix_parent = parent
        sequence.num_inherited_blocks = min(shared, sequence.num_to_prefill - 1) // block_size
