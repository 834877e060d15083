"""Block moves against a plain model of two pools: order, reads before writes, lots, donation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.placement import Placement
from jaxpage.device.types import KVCache, LayerKV
from jaxpage.engine.programs import Programs
from jaxpage.engine.swap import MOVES, BlockMover, HostPool
from jaxpage.errors import CapacityError
from jaxpage.host.plan import BlockMoves

NUM_BLOCKS = 1200


def pool() -> KVCache:
    """Two layers in which every block holds its own numbers."""
    keys = jax.random.split(jax.random.key(0), 4)
    leaves = [jax.random.normal(key, (NUM_BLOCKS, 2, 1, 3)) for key in keys]
    return (LayerKV(k=leaves[0], v=leaves[1]), LayerKV(k=leaves[2], v=leaves[3]))


def as_blocks(cache: KVCache) -> np.ndarray:
    return np.stack([np.asarray(leaf) for leaf in jax.tree.leaves(cache)], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 9, 600])
def test_moves_happen_in_order_and_read_before_they_write(count: int) -> None:
    rng = np.random.default_rng(count)
    mover = BlockMover(Programs(), pool(), Placement(), num_swap_blocks=count)
    cache, host = pool(), np.zeros((count, 4, 2, 1, 3), np.float32)
    device = as_blocks(cache)
    for _ in range(2):
        lot = rng.permutation(np.arange(1, NUM_BLOCKS))
        places = rng.permutation(count)
        out = list(zip(lot[:count].tolist(), places.tolist(), strict=True))
        back = list(zip(places.tolist(), lot[-count:].tolist(), strict=True))
        copies = list(zip(lot[:count].tolist(), np.roll(lot[:count], 1).tolist(), strict=True))
        moves = BlockMoves(tuple(out), tuple(back), tuple(copies))
        mover.prepare(moves)
        cache = mover.apply(cache, moves)
        for source, destination in out:
            host[destination] = device[source]
        for source, destination in back:
            device[destination] = host[source]
        read = device[[source for source, _ in copies]].copy()
        device[[destination for _, destination in copies]] = read
        np.testing.assert_array_equal(as_blocks(cache), device)


@pytest.mark.parametrize("kind", ["in", "copy"])
def test_the_pool_is_moved_in_place(kind: str) -> None:
    mover = BlockMover(Programs(), pool(), Placement(), num_swap_blocks=1)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pool()))
    memory = mover._program(kind, MOVES.sizes[0]).memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 0.1 * size


def test_the_number_of_programs_is_that_of_the_ladder() -> None:
    programs = Programs()
    mover = BlockMover(programs, pool(), Placement(), num_swap_blocks=8)
    for count in (1, 2, 7, 8):
        pairs = tuple((block, block - 1) for block in range(1, count + 1))
        mover.apply(pool(), BlockMoves(swap_out=pairs, copies=((1, 2),)))
    assert len(programs) == 2
    assert jnp.asarray(MOVES.sizes).tolist() == [8, 64, 512]


def test_more_blocks_to_swap_to_than_there_is_memory_says_so() -> None:
    with pytest.raises(CapacityError, match=r"got 4611686018427 blocks .*; lower swap_blocks"):
        HostPool(2**62 // 10**6, (2, 2, 16, 8, 64), np.dtype(np.float32))
