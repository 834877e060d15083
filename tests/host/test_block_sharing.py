"""Forked tables share what none writes, and copy a block just before its first write."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import PrefixHit
from jaxpage.outputs import MappedBlock


def forked(num_samples: int, num_tokens: int = 6, num_blocks: int = 12) -> BlockManager:
    """Samples 1 to num_samples of one prompt, blocks of 4."""
    blocks = BlockManager(CacheConfig(num_blocks, 4), enable_prefix_caching=True)
    tokens = list(range(num_tokens))
    blocks.open(1, num_tokens, blocks.match(tokens))
    blocks.store(1, num_tokens, tokens)
    for seq_id in range(2, num_samples + 1):
        blocks.fork(1, seq_id)
    blocks.check_integrity()
    return blocks


def test_samples_share_the_prompt_and_copy_its_last_block_but_once() -> None:
    blocks = forked(4)
    prompt = blocks.table(1)
    assert all(blocks.table(seq_id) == prompt for seq_id in (2, 3, 4))
    assert (blocks.num_free, blocks.pool.num_saved) == (10, 6)
    assert (blocks.pool.num_slots_in_use, blocks.pool.num_slots_allocated) == (6, 8)
    assert [blocks.num_blocks_to_write(seq_id, 1) for seq_id in (1, 2, 3, 4)] == [1, 1, 1, 1]
    for seq_id in (1, 2, 3, 4):
        blocks.prepare_write(seq_id, 1)
        blocks.check_integrity()
    assert blocks.table(4) is not None and blocks.table(4)[1] == prompt[1], "the last writes it"
    copies = tuple((prompt[1], blocks.table(seq_id)[1]) for seq_id in (1, 2, 3))
    assert blocks.take_moves().copies == copies
    assert {blocks.table(seq_id)[0] for seq_id in (1, 2, 3, 4)} == {prompt[0]}
    assert (blocks.num_free, blocks.pool.num_saved, blocks.pool.peak_saved) == (7, 3, 6)
    for seq_id in (1, 2, 3, 4):
        blocks.store(seq_id, 7)
    assert (blocks.pool.num_slots_in_use, blocks.pool.num_slots_allocated) == (16, 20)
    blocks.check_integrity()


def test_a_full_last_block_is_never_copied() -> None:
    blocks = forked(3, num_tokens=8)
    for seq_id in (1, 2, 3):
        assert blocks.num_blocks_to_write(seq_id, 1) == 1
        blocks.prepare_write(seq_id, 1)
    assert not blocks.take_moves()
    assert len({blocks.table(seq_id)[:2] for seq_id in (1, 2, 3)}) == 1
    assert len({blocks.table(seq_id)[2] for seq_id in (1, 2, 3)}) == 3


def test_shared_room_that_is_empty_is_replaced_without_a_copy() -> None:
    blocks = BlockManager(CacheConfig(6, 4), enable_prefix_caching=False)
    blocks.open(1, 12, PrefixHit())
    blocks.store(1, 4)
    blocks.fork(1, 2)
    assert blocks.num_blocks_to_write(2, 5) == 2
    blocks.prepare_write(2, 5)
    assert not blocks.take_moves()
    blocks.store(2, 9)
    blocks.check_integrity()
    assert blocks.num_free == 1


def test_a_row_with_room_of_its_own_costs_nothing_and_keeps_its_table() -> None:
    blocks = forked(2)
    blocks.prepare_write(1, 1)
    before = blocks.table(1)
    assert blocks.num_blocks_to_write(1, 2) == 0
    blocks.prepare_write(1, 2)
    assert blocks.table(1) is before
    blocks.store(1, 8)
    assert (blocks.num_blocks_to_write(1, 1), blocks.num_blocks_to_write(1, 5)) == (1, 2)


def test_the_last_one_left_writes_in_place() -> None:
    blocks = forked(2)
    before = blocks.table(2)
    blocks.free(1, until_step=3)  # a step still reads it, before anything written now
    assert blocks.num_blocks_to_write(2, 1) == 0
    blocks.prepare_write(2, 1)
    assert blocks.table(2) is before and not blocks.take_moves()
    blocks.check_integrity()


def test_where_nothing_is_needed_the_write_needs_no_preparation() -> None:
    blocks = forked(2)
    blocks.free(2, until_step=None)
    assert blocks.num_blocks_to_write(1, 2) == 0
    blocks.store(1, 8)
    blocks.check_integrity()


def test_samples_end_on_their_own() -> None:
    blocks = forked(3)
    blocks.free(2, until_step=5)
    blocks.free(1, until_step=None)
    assert (blocks.num_free, blocks.num_held) == (10, 0), "sample 3 shows them all"
    blocks.free(3, until_step=4)
    assert (blocks.num_free, blocks.num_held) == (10, 2)
    blocks.step_read(4)
    assert (blocks.num_free, blocks.num_held) == (10, 2)
    blocks.check_integrity()
    blocks.step_read(5)
    assert (blocks.num_free, blocks.num_held, blocks.pool.refs.num_evictable) == (12, 0, 1)
    blocks.check_integrity()


def test_beams_share_what_they_have_in_common() -> None:
    """Beam 4 over 64 tokens: far fewer blocks than four sequences of their own."""
    blocks = BlockManager(CacheConfig(100, 4), enable_prefix_caching=False)
    blocks.open(0, 5, PrefixHit())
    blocks.store(0, 5)
    beams, num_ids, peak = [0], 1, 0
    for step in range(64):
        chosen = [beams[0], beams[0], beams[-1], beams[step % len(beams)]]
        children = list(range(num_ids, num_ids + 4))
        num_ids += 4
        for parent, child in zip(chosen, children, strict=True):
            blocks.fork(parent, child)
        for beam in beams:
            blocks.free(beam, until_step=None)
        for child in children:
            blocks.prepare_write(child, 1)
        blocks.take_moves()
        for child in children:
            blocks.store(child, 6 + step)
        blocks.check_integrity()
        beams, peak = children, max(peak, blocks.pool.refs.num_used)
    assert peak < 2 * 18, f"{peak} blocks, where one sequence needs 18"


def test_the_map_says_who_owns_what() -> None:
    blocks = BlockManager(CacheConfig(6, 2), enable_prefix_caching=True)
    for seq_id, tokens in ((1, [1, 2, 3]), (2, [7, 8, 9])):
        blocks.open(seq_id, 3, blocks.match(tokens))
        blocks.store(seq_id, 3, tokens)
    blocks.fork(1, 3)
    blocks.free(2, until_step=1)
    blocks.open(4, 1, PrefixHit())
    found = blocks.block_map()
    assert found.block_size == 2
    assert found.blocks == (
        MappedBlock("owned", (1, 3), 2, is_cached=True),
        MappedBlock("owned", (1, 3), 1),
        MappedBlock("held", is_cached=True),
        MappedBlock("held"),
        MappedBlock("owned", (4,), 0),
        MappedBlock("free"),
    )
    blocks.step_read(1)
    assert blocks.block_map().blocks[2:4] == (
        MappedBlock("cached", (), 2, is_cached=True),
        MappedBlock("free"),
    )


@pytest.mark.parametrize("damage", ["written in place", "fill", "saved"])
def test_the_check_finds_damage(damage: str) -> None:
    blocks = forked(2)
    if damage == "written in place":
        blocks._tables[1].num_writable = 8
    elif damage == "fill":
        blocks._tables[1].num_stored = 5
    else:
        blocks.pool.num_entries += 1
    with pytest.raises(AssertionError):
        blocks.check_integrity()
