"""A block is free, held or waiting for a step, never two of them."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpage.config import NULL_BLOCK
from jaxpage.host.block_pool import RefCounts


def test_every_block_but_the_null_block_is_given_out_once() -> None:
    pool = RefCounts(5)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == [1, 2, 3, 4, 5] and NULL_BLOCK not in blocks
    assert (pool.num_free, pool.num_used, pool.peak_used) == (0, 5, 5)
    with pytest.raises(AssertionError, match="all 5 blocks are in use"):
        pool.allocate()


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = RefCounts(2)
    block = pool.allocate()
    pool.incref(block)
    pool.decref(block)
    assert pool.num_holders(block) == 1 and pool.num_free == 1
    pool.decref(block)
    assert pool.num_holders(block) == 0 and pool.num_free == 2
    assert pool.peak_used == 1


def test_a_block_that_is_kept_is_evictable_until_it_is_used_or_evicted() -> None:
    pool = RefCounts(3)
    first, second = pool.allocate(), pool.allocate()
    assert pool.decref(first, keep=True) and pool.decref(second, keep=True)
    assert (pool.num_evictable, pool.num_free, pool.num_used) == (2, 1, 0)
    pool.check_integrity()
    pool.touch(first)
    pool.evict(second)
    assert (pool.num_evictable, pool.num_free, pool.num_used) == (0, 2, 1)
    pool.check_integrity()
    for operation in (pool.touch, pool.evict):
        for block in (first, second):
            with pytest.raises(AssertionError, match="not evictable"):
                operation(block)


@pytest.mark.parametrize("operation", ["decref", "incref"])
@pytest.mark.parametrize("block", [-1, NULL_BLOCK, 1, 3])
def test_what_is_not_in_use_is_neither_shared_nor_freed(operation: str, block: int) -> None:
    with pytest.raises(AssertionError):
        getattr(RefCounts(2), operation)(block)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "incref", "decref"]), st.integers(0, 99))))
def test_random_operations_keep_the_count(operations: list[tuple[str, int]]) -> None:
    pool = RefCounts(4)
    held: list[int] = []
    for name, pick in operations:
        if name == "allocate" and pool.num_free:
            block = pool.allocate()
            assert block not in held
            held.append(block)
        elif name == "incref" and held:
            held.append(held[pick % len(held)])
            pool.incref(held[-1])
        elif name == "decref" and held:
            pool.decref(held.pop(pick % len(held)))
        pool.check_integrity()
        assert pool.num_used == len(set(held))
        assert all(pool.num_holders(block) == Counter(held)[block] for block in range(1, 5))


@pytest.mark.parametrize("damage", ["free twice", "null given", "held and free", "lost"])
def test_the_check_finds_damage(damage: str) -> None:
    pool = RefCounts(3)
    block = pool.allocate()
    if damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "null given":
        pool._free.append(NULL_BLOCK)
    elif damage == "held and free":
        pool._free.append(block)
    else:
        pool._num_holders[block] = 0
    with pytest.raises(AssertionError):
        pool.check_integrity()
