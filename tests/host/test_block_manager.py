"""Tables grow block by block and give everything back."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import PrefixHit


def manager(num_blocks: int = 6) -> BlockManager:
    return BlockManager(
        CacheConfig(num_blocks=num_blocks, block_size=4), enable_prefix_caching=False
    )


def test_a_table_holds_what_was_asked_for_and_grows_by_one() -> None:
    blocks = manager()
    blocks.open(1, 5, PrefixHit())
    assert len(blocks.table(1)) == 2 and blocks.num_blocks_to_write(1, 8) == 0
    before = blocks.table(1)
    assert blocks.table(1) is before
    blocks.store(1, 8)
    blocks.prepare_write(1, 1)
    assert blocks.table(1)[:2] == before and len(blocks.table(1)) == 3
    blocks.check_integrity()


def test_slots_in_use_follow_what_is_stored() -> None:
    blocks = manager()
    blocks.open(1, 5, PrefixHit())
    blocks.open(2, 1, PrefixHit())
    blocks.store(1, 4)
    blocks.store(1, 5)
    blocks.store(2, 1)
    assert (blocks.pool.num_slots_in_use, blocks.pool.num_slots_allocated) == (6, 12)
    with pytest.raises(AssertionError):
        blocks.store(1, 9)
    blocks.free(1, until_step=None)
    assert (blocks.pool.num_slots_in_use, blocks.pool.num_slots_allocated) == (1, 4)
    blocks.check_integrity()


def test_released_blocks_wait_for_their_step() -> None:
    blocks = manager()
    blocks.open(1, 8, PrefixHit())
    blocks.open(2, 4, PrefixHit())
    blocks.free(1, until_step=4)
    blocks.free(2, until_step=3)
    assert (blocks.num_free, blocks.num_held, blocks.pool.num_slots_allocated) == (3, 3, 0)
    blocks.check_integrity()
    for step, num_free in ((2, 3), (3, 4), (4, 6)):
        blocks.step_read(step)
        blocks.check_integrity()
        assert (blocks.num_free, blocks.num_held) == (num_free, 6 - num_free)


def test_a_freed_block_is_given_out_again() -> None:
    blocks = manager(2)
    blocks.open(1, 8, PrefixHit())
    first = blocks.table(1)
    blocks.free(1, until_step=None)
    blocks.open(2, 8, PrefixHit())
    assert blocks.table(2) == first
    with pytest.raises(KeyError):
        blocks.table(1)


def test_the_check_finds_a_block_in_two_tables() -> None:
    blocks = manager()
    blocks.open(1, 4, PrefixHit())
    blocks.open(2, 4, PrefixHit())
    blocks._tables[2] = blocks._tables[1]
    with pytest.raises(AssertionError, match="holders"):
        blocks.check_integrity()
