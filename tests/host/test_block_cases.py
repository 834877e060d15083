"""Leaks and double frees that other engines had, at the level of blocks, contents checked."""

from __future__ import annotations

import random

import pytest

from benchmarks.checks.block_model import BlockModel
from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager


def model(num_blocks: int, block_size: int, *, caching: bool = True) -> BlockModel:
    config = CacheConfig(num_blocks, block_size)
    return BlockModel(config, BlockManager(config, enable_prefix_caching=caching))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_requests", "num_blocks", "block_size", "chunk"), [(500, 64, 4, 64), (50, 64, 16, 8)]
)
def test_when_idle_every_block_is_free_or_cached(
    num_requests: int, num_blocks: int, block_size: int, chunk: int, caching: bool
) -> None:
    """Random prompts with common beginnings, prefilled in chunks beside others' decodes."""
    rng = random.Random(7)
    world = model(num_blocks, block_size, caching=caching)
    blocks, num_left = world.blocks, {}
    waiting = [[rng.randrange(2) for _ in range(rng.randint(1, 40))] for _ in range(num_requests)]
    while waiting or world.running:
        if waiting and len(world.running) < 8:
            seq_id = world.open(waiting[-1], None, len(waiting[-1]))
            if seq_id is not None:
                waiting.pop()
                num_left[seq_id] = rng.randint(0, 8)
        for seq_id, entry in list(world.running.items()):
            prompt_left = len(entry.token_ids) - entry.num_stored
            if prompt_left > chunk:
                blocks.prepare_write(seq_id, chunk)
                entry.num_planned = chunk
            elif not world.plan_row(seq_id, [] if prompt_left else [rng.randrange(2)]):
                world.release(seq_id)
                continue
            if not prompt_left:
                num_left[seq_id] -= 1
        world.dispatch(num_unknown=1)
        blocks.check_integrity()
        for seq_id in list(world.running):
            if num_left[seq_id] < 0:
                world.release(seq_id)
        world.read()
        pool = blocks.pool.refs
        assert pool.num_free + blocks.pool.refs.num_evictable + pool.num_used == num_blocks
    while world.unread:
        world.read()
    refs = blocks.pool.refs
    assert refs.num_free + refs.num_evictable == num_blocks == blocks.num_free
    assert (refs.num_evictable > 0) == caching
    world.end()


def test_the_slot_of_the_last_token_is_freed_once() -> None:
    world = model(256, 1)
    seq_id = world.open([1, 0, 1], None, 3)
    assert seq_id is not None
    world.plan_row(seq_id, [])
    for step in range(200):
        world.dispatch()
        assert world.plan_row(seq_id, [step % 2])
        world.blocks.check_integrity()
    world.dispatch()
    assert world.blocks.num_free == 256 - 203
    world.release(seq_id)
    while world.unread:
        world.read()
        assert world.blocks.num_free <= 256
    assert world.blocks.num_free == 256
    world.end()


def test_an_evicted_prompt_is_computed_anew() -> None:
    world = model(4, 2)
    for token_ids, hit_tokens in (([1, 1, 1, 0, 1], 0), ([0, 0, 0, 0, 0, 0, 0], 0), ([1] * 5, 0)):
        before = world.counts["hit tokens"]
        seq_id = world.open(token_ids, None, len(token_ids))
        assert seq_id is not None
        assert world.counts["hit tokens"] - before == hit_tokens
        world.plan_row(seq_id, [])
        world.dispatch()
        world.release(seq_id)
        world.read()
    assert world.blocks.match([1, 1, 1, 0, 1]).num_tokens == 2, "of the third; the first is evicted"
    world.end()


def test_memory_follows_use_and_not_what_is_allowed() -> None:
    world = model(600, 16)
    seq_id = world.open([1] * 20, None, 20)
    assert seq_id is not None
    for _ in range(5):
        world.plan_row(seq_id, [0])
        world.dispatch()
    assert world.blocks.pool.refs.peak_used == 2  # of 20 + 5 tokens
    world.end()
