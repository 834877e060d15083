"""What is found is what was asked for, and what goes is the least recently used leaf."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import HashTokens, PrefixCache, PrefixHit, hash_tokens
from tests.host.fake import salted
from tests.host.test_block_random import constant_hash


def manager(num_blocks: int, block_size: int = 2, **options: HashTokens) -> BlockManager:
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return BlockManager(config, enable_prefix_caching=True, **options)


def run(blocks: BlockManager, seq_id: int, token_ids: str, salt: str | None = None) -> int:
    """Opens and stores a prompt; returns the tokens of its hit."""
    tokens = [ord(letter) for letter in token_ids]
    hit = blocks.match(tokens, salted(salt))
    blocks.open(seq_id, len(tokens), hit)
    blocks.store(seq_id, len(tokens), tokens)
    blocks.check_integrity()
    return hit.num_tokens


def end(blocks: BlockManager, *seq_ids: int) -> None:
    for seq_id in seq_ids:
        blocks.free(seq_id, until_step=None)
        blocks.check_integrity()


def hit_tokens(blocks: BlockManager, token_ids: str, salt: str | None = None) -> int:
    return blocks.match([ord(letter) for letter in token_ids], salted(salt)).num_tokens


def test_a_hit_is_the_longest_chain_and_leaves_a_token_to_compute() -> None:
    blocks = manager(8)
    run(blocks, 1, "abcdef")
    assert hit_tokens(blocks, "abcdefg") == 6
    assert hit_tokens(blocks, "abcdef") == 4, "the last token must be computed"
    assert hit_tokens(blocks, "abcd") == 2
    assert hit_tokens(blocks, "abXdef") == 2
    assert hit_tokens(blocks, "aXcdef") == 0 == hit_tokens(blocks, "ab")
    assert hit_tokens(blocks, "cdef") == 0, "a block hangs on every token before it"
    tokens = [ord(letter) for letter in "abcdefg"]
    assert blocks.match(tokens, most_tokens=5).num_tokens == 4
    assert blocks.match(tokens, most_tokens=0).num_tokens == 0


def test_a_hit_is_shared_while_it_is_used_and_costs_its_idle_blocks() -> None:
    blocks = manager(8)
    run(blocks, 1, "abcde")
    tokens = [ord(letter) for letter in "abcdxyz"]
    hit = blocks.match(tokens)
    assert blocks.num_needed(7, hit) == 2
    end(blocks, 1)
    assert (blocks.num_free, blocks.pool.refs.num_evictable) == (8, 2)
    assert blocks.num_needed(7, hit) == 4, "evictable blocks stop being free"
    blocks.open(2, 7, hit)
    assert (blocks.num_free, blocks.pool.refs.num_evictable, blocks.num_stored(2)) == (4, 0, 4)
    assert blocks.table(2)[:2] == hit.block_ids
    blocks.check_integrity()


def test_blocks_are_cached_once_their_tokens_are_known() -> None:
    blocks = manager(8)
    blocks.open(1, 2, blocks.match([1]))
    blocks.store(1, 2, [1])  # the second token is in flight
    assert blocks.match([1, 2, 3]).num_tokens == 0
    blocks.prepare_write(1, 1)
    blocks.store(1, 3, [1, 2])
    assert blocks.match([1, 2, 3]).num_tokens == 2
    blocks.check_integrity()


def test_of_two_full_blocks_only_the_known_one_is_cached() -> None:
    blocks = manager(8)
    blocks.open(1, 4, blocks.match([1, 2, 3, 4]))
    blocks.store(1, 4, [1, 2, 3])
    assert blocks.match([1, 2, 3, 4, 5]).num_tokens == 2
    blocks.check_integrity()


def test_a_block_that_waits_for_a_step_is_a_hit() -> None:
    blocks = manager(4)
    run(blocks, 1, "abc")
    blocks.free(1, until_step=3)
    tokens = [ord(letter) for letter in "abd"]
    hit = blocks.match(tokens)
    assert (hit.num_tokens, blocks.num_needed(3, hit), blocks.num_held) == (2, 1, 2)
    blocks.open(2, 3, hit)
    assert (blocks.num_held, blocks.num_free) == (1, 1)
    blocks.check_integrity()
    blocks.step_read(3)
    assert (blocks.num_held, blocks.num_free) == (0, 2)
    blocks.check_integrity()


def test_nothing_is_cached_with_caching_off() -> None:
    blocks = BlockManager(CacheConfig(4, 2), enable_prefix_caching=False)
    blocks.open(1, 2, blocks.match([1, 2]))
    blocks.store(1, 2, [1, 2])
    end(blocks, 1)
    assert blocks.match([1, 2, 3]).num_tokens == 0 == blocks.pool.refs.num_evictable


def test_one_that_takes_no_hit_is_found_by_others() -> None:
    blocks = manager(8)
    run(blocks, 1, "abc")
    tokens = [ord(letter) for letter in "abcd"]
    blocks.open(2, 4, PrefixHit())
    blocks.store(2, 4, tokens)
    assert blocks.table(2)[0] == blocks.table(1)[0], "its copy was replaced by the cached block"
    assert hit_tokens(blocks, "abcde") == 4
    blocks.check_integrity()


def test_equal_prompts_in_one_step_end_up_sharing() -> None:
    blocks = manager(12)
    tokens = [1, 2, 3, 4, 5]
    for seq_id in (1, 2, 3):
        blocks.open(seq_id, 5, blocks.match(tokens))
    before = blocks.table(2)
    for seq_id in (1, 2, 3):
        blocks.store(seq_id, 5, tokens, until_step=1)
        blocks.check_integrity()
    assert blocks.table(1)[:2] == blocks.table(2)[:2] == blocks.table(3)[:2]
    assert blocks.table(2)[2] == before[2], "the block that is not full stays its own"
    assert (blocks.pool.num_saved, blocks.num_held, blocks.num_free) == (4, 4, 3)
    blocks.step_read(1)
    assert (blocks.num_held, blocks.num_free) == (0, 7)
    blocks.check_integrity()


def test_a_shared_private_block_is_not_replaced() -> None:
    """Tables that share it would lose the ancestors of what both have after it."""
    blocks = manager(12)
    for seq_id in (1, 2):
        blocks.open(seq_id, 4, blocks.match([9]))
        blocks.store(seq_id, 4)
    blocks.fork(2, 3)
    blocks.store(1, 4, [1, 2, 3, 4])
    own = blocks.table(2)
    blocks.store(2, 4, [1, 2, 3, 4])
    assert blocks.table(2) is own
    blocks.check_integrity()
    end(blocks, 3)
    blocks.prepare_write(2, 2)
    blocks.store(2, 6, [1, 2, 3, 4, 5, 6])
    assert blocks.table(2)[:2] == blocks.table(1), "alone it does"
    blocks.check_integrity()


def test_the_least_recently_used_leaf_goes_first_and_is_never_found_again() -> None:
    blocks = manager(6)
    run(blocks, 1, "abcd")
    run(blocks, 2, "xyzw")
    end(blocks, 1, 2)
    assert run(blocks, 3, "abcq") == 2, "a b is used again"
    end(blocks, 3)  # evictable, oldest first: cd, zw, xy, cq, ab
    want = [("abcd!", 4), ("xyzw!", 4), ("abcq!", 4)]
    assert [hit_tokens(blocks, text) for text, _ in want] == [4, 4, 4]
    found: list[list[int]] = []
    for seq_id in range(10, 16):
        blocks.open(seq_id, 1, PrefixHit())
        blocks.check_integrity()
        found.append([hit_tokens(blocks, text) for text, _ in want])
    assert found == [[4, 4, 4], [2, 4, 4], [2, 2, 4], [2, 0, 4], [2, 0, 2], [0, 0, 0]]
    assert blocks.num_free == 0


def test_hit_blocks_are_not_evicted_for_the_same_request() -> None:
    blocks = manager(3)
    run(blocks, 1, "abcd")
    end(blocks, 1)
    hit = blocks.match([ord(letter) for letter in "abcdef"])
    assert (hit.num_tokens, blocks.num_needed(6, hit), blocks.num_needed(7, hit)) == (4, 3, 4)
    blocks.open(2, 6, hit)
    assert blocks.table(2)[:2] == hit.block_ids and len(set(blocks.table(2))) == 3
    blocks.check_integrity()


def test_a_stale_hit_is_refused() -> None:
    blocks = manager(2)
    run(blocks, 1, "abc")
    end(blocks, 1)
    hit = blocks.match([ord(letter) for letter in "abc"])
    blocks.open(2, 4, PrefixHit())
    with pytest.raises(AssertionError, match="stale hit"):
        blocks.open(3, 3, hit)


def test_salts_and_other_kinds_of_key_never_meet() -> None:
    blocks = manager(12)
    assert run(blocks, 1, "abcd") == 0
    assert run(blocks, 2, "abcd", "x") == 0
    assert run(blocks, 3, "abcd", "y") == 0
    assert [hit_tokens(blocks, "abcde", salt) for salt in (None, "x", "y", "z", "")] == [
        4,
        4,
        4,
        0,
        0,
    ]
    assert len({blocks.table(seq_id) for seq_id in (1, 2, 3)}) == 3
    cache = PrefixCache(1, hash_tokens=constant_hash)
    cache.add((("adapter", "x"),), (7,), 1)
    assert cache.match([7], (("adapter", "x"),), 1).num_tokens == 1
    assert cache.match([7], salted("x"), 1).num_tokens == 0
    assert cache.match([7], salted(None), 1).num_tokens == 0


@pytest.mark.parametrize("hash_block", [hash_tokens, constant_hash])
def test_clashing_hashes_serve_no_other_prompts_blocks(hash_block: HashTokens) -> None:
    blocks = manager(80, hash_tokens=hash_block)
    prompts = [f"{a}{b}cdef" for a in "abcd" for b in "abcde"]
    assert [run(blocks, seq_id, text) for seq_id, text in enumerate(prompts)] == [0] * 20
    for seq_id, text in enumerate(prompts):
        hit = blocks.match([ord(letter) for letter in text + "!"])
        assert (hit.num_tokens, hit.block_ids) == (6, blocks.table(seq_id)[:3])


def test_after_a_reset_nothing_older_is_found_or_entered() -> None:
    blocks = manager(10)
    run(blocks, 1, "abcd")
    run(blocks, 2, "xyz")
    end(blocks, 2)
    stale = blocks.match([ord(letter) for letter in "abcde"])
    blocks.reset_prefix_cache()
    blocks.check_integrity()
    assert (
        blocks.pool.refs.num_evictable,
        hit_tokens(blocks, "abcde"),
        hit_tokens(blocks, "xyz"),
    ) == (0, 0, 0)
    with pytest.raises(AssertionError, match="stale hit"):
        blocks.open(3, 5, stale)
    blocks.prepare_write(1, 2)
    blocks.store(1, 6, [ord(letter) for letter in "abcdef"])
    assert hit_tokens(blocks, "abcdefg") == 0, "it began before the reset"
    assert run(blocks, 4, "abcd") == 0 and hit_tokens(blocks, "abcde") == 4
    end(blocks, 1, 4)


def test_the_same_prompt_a_thousand_times_in_a_pool_of_16() -> None:
    blocks = manager(16, 4)
    for seq_id in range(1000):
        assert run(blocks, seq_id, "the same prompt each time") == (24 if seq_id else 0)
        assert 0 < blocks.pool.refs.num_used <= 16
        end(blocks, seq_id)
    assert (blocks.num_free, blocks.pool.refs.num_free + blocks.pool.refs.num_evictable) == (16, 16)
    assert blocks.pool.refs.peak_used == 7


def test_two_prompts_that_share_five_blocks_are_counted_once() -> None:
    blocks = manager(20)
    run(blocks, 1, "0123456789ab")
    run(blocks, 2, "0123456789xy")
    for seq_id in (1, 2):
        pool = blocks.pool.refs
        assert pool.num_free + blocks.pool.refs.num_evictable + pool.num_used == 20
        end(blocks, seq_id)
    assert (pool.num_used, blocks.pool.refs.num_evictable, blocks.num_free) == (0, 7, 20)


@pytest.mark.parametrize("damage", ["lost", "other tokens", "orphan", "evictable parent", "count"])
def test_the_check_finds_damage(damage: str) -> None:
    blocks = manager(8)
    run(blocks, 1, "abcdef")
    cache = blocks._prefixes
    first, second = (cache.entry(block) for block in blocks.table(1)[:2])
    assert first is not None and second is not None
    if damage == "lost":
        cache._by_key.clear()
    elif damage == "other tokens":
        second.token_ids = (1, 2)
    elif damage == "orphan":
        second.parent = salted("x")
    elif damage == "evictable parent":
        cache._evictable[first.block] = None
    else:
        first.num_children = 0
    with pytest.raises(AssertionError):
        blocks.check_integrity()
