"""A group leaves for the host and comes back shared as it was."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import PrefixHit


def samples(num_swap_blocks: int, *, caching: bool = False, num_blocks: int = 8) -> BlockManager:
    """Samples 1 and 2: a shared block of 4, then one of their own each with two tokens."""
    config = CacheConfig(num_blocks, 4, num_swap_blocks)
    blocks = BlockManager(config, enable_prefix_caching=caching)
    blocks.open(1, 4, blocks.match([1, 2, 3, 4]))
    blocks.store(1, 4, [1, 2, 3, 4])
    blocks.fork(1, 2)
    for seq_id in (1, 2):
        blocks.prepare_write(seq_id, 2)
        blocks.store(seq_id, 6)
    blocks.take_moves()
    blocks.check_integrity()
    return blocks


def test_shared_blocks_move_once_each_way_and_are_shared_again() -> None:
    blocks = samples(3)
    before = [blocks.table(seq_id) for seq_id in (1, 2)]
    assert blocks.num_to_swap_out([1, 2]) == 3 and blocks.can_swap_out([1, 2])
    assert blocks.swap_out([1, 2], until_step=None) == 3
    assert blocks.take_moves().swap_out == (
        (before[0][0], 0),
        (before[0][1], 1),
        (before[1][1], 2),
    )
    assert (blocks.num_free, blocks._host.num_free) == (8, 0)
    assert blocks.is_swapped(1) and not blocks.has_table(1)
    assert [each.host_block for each in blocks._host.tables[2].blocks] == [0, 2]
    blocks.check_integrity()
    assert blocks.num_needed_to_swap_in([1, 2]) == 3
    assert blocks.swap_in([1, 2]) == 3
    after = [blocks.table(seq_id) for seq_id in (1, 2)]
    assert after[0][0] == after[1][0] and after[0][1] != after[1][1]
    assert blocks.take_moves().swap_in == ((0, after[0][0]), (1, after[0][1]), (2, after[1][1]))
    assert (blocks.num_free, blocks._host.num_free, blocks.pool.num_slots_in_use) == (5, 3, 8)
    assert blocks.num_stored(1) == 6 and blocks.num_blocks_to_write(1, 1) == 0
    blocks.check_integrity()


def test_without_room_on_the_host_nothing_is_possible() -> None:
    assert not samples(2).can_swap_out([1, 2])
    assert not samples(0).can_swap_out([1])
    assert samples(2).can_swap_out([1])


def test_only_what_is_filled_moves() -> None:
    blocks = BlockManager(CacheConfig(8, 4, 4), enable_prefix_caching=False)
    blocks.open(1, 16, PrefixHit())
    blocks.store(1, 5)
    assert blocks.swap_out([1], until_step=None) == 2
    blocks.swap_in([1])
    assert len(blocks.table(1)) == 2 and blocks.num_blocks_to_write(1, 4) == 1


def test_a_block_in_other_tables_leaves_in_copy_only() -> None:
    blocks = samples(3)
    shared = blocks.table(1)[0]
    blocks.swap_out([1], until_step=None)
    assert blocks.take_moves().swap_out[0] == (shared, 0)
    assert blocks.table(2)[0] == shared and blocks.num_free == 6
    blocks.check_integrity()


def test_what_the_cache_still_has_does_not_move_back() -> None:
    blocks = samples(3, caching=True)
    cached = blocks.table(1)[0]
    blocks.swap_out([1, 2], until_step=None)
    assert len(blocks.take_moves().swap_out) == 3, "it may be evicted meanwhile"
    assert (blocks.num_free, blocks.pool.refs.num_evictable) == (8, 1)
    assert blocks.num_needed_to_swap_in([1, 2]) == 3
    assert blocks.swap_in([1, 2]) == 2
    assert blocks.table(1)[0] == blocks.table(2)[0] == cached
    assert [host for host, _ in blocks.take_moves().swap_in] == [1, 2]
    blocks.check_integrity()
    blocks.prepare_write(1, 2)
    blocks.store(1, 8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8, "its chain goes on"
    blocks.check_integrity()


def test_what_was_evicted_meanwhile_comes_back_and_is_cached_again() -> None:
    blocks = samples(3, caching=True)
    blocks.swap_out([1, 2], until_step=None)
    blocks.take_moves()
    blocks.open(9, 32, PrefixHit())
    blocks.free(9, until_step=None)
    assert (blocks.pool.refs.num_evictable, blocks.match([1, 2, 3, 4, 5]).num_tokens) == (0, 0)
    assert blocks.swap_in([1, 2]) == 3
    blocks.take_moves()
    blocks.prepare_write(1, 1)
    blocks.store(1, 7, [1, 2, 3, 4, 5, 6, 7])
    assert blocks.match([1, 2, 3, 4, 5]).block_ids == blocks.table(1)[:1]
    blocks.check_integrity()


def test_a_reset_meanwhile_is_not_undone() -> None:
    blocks = samples(3, caching=True)
    blocks.swap_out([1, 2], until_step=None)
    blocks.take_moves()
    blocks.reset_prefix_cache()
    assert blocks.swap_in([1, 2]) == 3
    blocks.prepare_write(1, 1)
    blocks.store(1, 7, [1, 2, 3, 4, 5, 6, 7])
    assert blocks.match([1, 2, 3, 4, 5]).num_tokens == 0
    blocks.check_integrity()


def test_blocks_may_wait_for_a_step_instead() -> None:
    blocks = samples(3)
    blocks.swap_out([1, 2], until_step=7)
    assert (blocks.num_free, blocks.num_held) == (5, 3)
    blocks.step_read(7)
    assert (blocks.num_free, blocks.num_held) == (8, 0)


def test_what_ends_on_the_host_gives_its_blocks_back_and_moves_nothing() -> None:
    blocks = samples(3)
    blocks.swap_out([1, 2], until_step=None)
    blocks.free_swapped(1)
    blocks.check_integrity()
    assert blocks._host.num_free == 1
    assert [host for _, host in blocks.take_moves().swap_out] == [0, 2]
    blocks.free_swapped(2)
    assert blocks._host.num_free == 3
    blocks.check_integrity()


def test_what_the_plan_reads_is_not_free_when_another_sharer_ends() -> None:
    blocks = samples(3)
    blocks.swap_out([1, 2], until_step=None)
    blocks.take_moves()
    blocks.swap_in([1])
    blocks.free_swapped(2)
    assert blocks._host.num_free == 1, "host block 0 is read by the plan being made"
    blocks.check_integrity()
    blocks.take_moves()
    assert blocks._host.num_free == 3


@pytest.mark.parametrize("damage", ["lost", "twice"])
def test_the_check_finds_damage(damage: str) -> None:
    blocks = samples(4)
    blocks.swap_out([1, 2], until_step=None)
    if damage == "lost":
        blocks._host._free.pop()
    else:
        blocks._host._num_holders[0] += 1
    with pytest.raises(AssertionError):
        blocks.check_integrity()
