"""Moves of one plan never clash, whatever was called before it was made."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.moves import PendingMoves
from jaxpage.host.plan import BlockMoves
from jaxpage.host.prefix_cache import PrefixHit


def shared(num_blocks: int = 4, num_swap_blocks: int = 0) -> BlockManager:
    """Sequences 1 and 2 share block 1, of which three slots of four are filled."""
    blocks = BlockManager(CacheConfig(num_blocks, 4, num_swap_blocks), enable_prefix_caching=False)
    blocks.open(1, 3, PrefixHit())
    blocks.store(1, 3)
    blocks.fork(1, 2)
    return blocks


def test_a_copy_of_a_copy_reads_the_first_source() -> None:
    blocks = shared()
    blocks.prepare_write(1, 1)
    blocks.fork(1, 3)
    blocks.prepare_write(3, 1)
    assert blocks.table(1) != blocks.table(3)
    moves = blocks.take_moves()
    assert moves.copies == ((1, blocks.table(1)[0]), (1, blocks.table(3)[0]))
    blocks.check_integrity()


def test_a_copy_into_a_block_that_is_given_back_is_dropped() -> None:
    blocks = shared()
    blocks.prepare_write(1, 1)
    assert blocks.num_free == 2
    blocks.free(1, until_step=None)
    blocks.check_integrity()
    assert blocks.num_free == 3
    assert blocks.take_moves() == BlockMoves()
    assert blocks.pool.refs.num_holders(blocks.table(2)[0]) == 1, "nothing is pinned"


def test_the_source_of_a_copy_is_not_given_out_before_the_plan_is_made() -> None:
    blocks = shared()
    blocks.prepare_write(1, 1)
    blocks.free(2, until_step=None)
    blocks.check_integrity()
    assert (blocks.num_free, blocks.num_held) == (2, 0), "no step must be waited for"
    assert blocks.take_moves().copies == ((1, 2),)
    assert blocks.num_free == 3
    blocks.check_integrity()


def test_a_copy_goes_to_the_host_from_where_it_was() -> None:
    blocks = shared(num_swap_blocks=1)
    blocks.prepare_write(1, 1)
    assert blocks.swap_out([1], until_step=None) == 1
    moves = blocks.take_moves()
    assert (moves.swap_out, moves.copies) == (((1, 0),), ())
    blocks.check_integrity()


def test_what_came_in_with_the_plan_may_leave_in_it() -> None:
    blocks = shared(num_swap_blocks=2)
    blocks.swap_out([1, 2], until_step=None)
    blocks.take_moves()
    blocks.swap_in([1, 2])
    blocks.prepare_write(1, 1)
    blocks.swap_out([1, 2], until_step=None)
    blocks.check_integrity()
    assert blocks.take_moves() == BlockMoves(), "it has never left the host"
    assert (blocks.num_free, blocks._host.num_free) == (4, 1)
    blocks.swap_in([1, 2])
    assert blocks.take_moves().swap_in == ((0, blocks.table(1)[0]),)
    blocks.check_integrity()


def test_host_blocks_are_reused_by_the_next_plan_only() -> None:
    blocks = BlockManager(CacheConfig(2, 4, 1), enable_prefix_caching=False)
    for seq_id in (1, 2):
        blocks.open(seq_id, 4, PrefixHit())
        blocks.store(seq_id, 4)
    blocks.swap_out([1], until_step=None)
    blocks.take_moves()
    blocks.swap_in([1])
    assert not blocks.can_swap_out([2])
    blocks.take_moves()
    assert blocks.can_swap_out([2])


def test_nothing_is_written_twice() -> None:
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.swap_in(0, 3)
    moves.swap_out(4, 1)
    for again in (
        lambda: moves.copy(5, 2),
        lambda: moves.swap_in(2, 3),
        lambda: moves.swap_out(6, 1),
    ):
        with pytest.raises(AssertionError, match="twice"):
            again()
