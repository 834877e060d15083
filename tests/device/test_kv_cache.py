"""The pool: its size, that it is updated in place, and that copies read before they write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.config import ModelConfig
from jaxpage.device.kv_cache import apply_moves, block_bytes, init_cache, write_kv
from jaxpage.device.types import LayerKV
from jaxpage.errors import ConfigError

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    dtype="bfloat16",
)


@pytest.mark.parametrize(("dtype", "size"), [(None, 2), ("float32", 4)])
def test_the_pool_holds_the_null_block_besides(dtype: str | None, size: int) -> None:
    cache = init_cache(CONFIG, num_blocks=5, block_size=3, dtype=dtype)
    leaves = jax.tree.leaves(cache)
    assert [leaf.shape for leaf in leaves] == [(6, 3, 2, 8)] * 4
    assert all(leaf.dtype.itemsize == size for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 4  # each can be donated
    total = sum(leaf.nbytes for leaf in leaves)
    assert block_bytes(CONFIG, 3, dtype) * 6 == total


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        init_cache(CONFIG, num_blocks=0, block_size=3)
    with pytest.raises(ConfigError, match="block_size=0"):
        init_cache(CONFIG, num_blocks=1, block_size=0)


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_a_donated_pool_is_never_copied_by_a_write(num_tokens: int) -> None:
    pool = jax.ShapeDtypeStruct((512, 16, 2, 8), jnp.float32)
    rows = jax.ShapeDtypeStruct((num_tokens, 2, 8), jnp.float32)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    lowered = jax.jit(write_kv, donate_argnums=0).lower(LayerKV(pool, pool), rows, rows, slots)
    _assert_in_place(lowered, pool)


@pytest.mark.parametrize("num_copies", [1, 8])
def test_a_donated_pool_is_never_copied_by_block_copies(num_copies: int) -> None:
    pool = jax.ShapeDtypeStruct((512, 16, 2, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((num_copies,), jnp.int32)
    lowered = jax.jit(apply_moves, donate_argnums=0).lower((LayerKV(pool, pool),), ids, ids)
    _assert_in_place(lowered, pool)


def test_writes_land_on_their_slots_and_padding_is_dropped() -> None:
    layer = LayerKV(*jnp.zeros((2, 3, 2, 1, 1)))
    k = jnp.arange(1.0, 5).reshape(4, 1, 1)
    layer = write_kv(layer, k, -k, jnp.array([3, 6, 2, 7], jnp.int32))
    np.testing.assert_array_equal(np.ravel(layer.k), [0, 0, 3, 1, 0, 0])
    np.testing.assert_array_equal(np.ravel(layer.v), [0, 0, -3, -1, 0, 0])


def test_copies_read_everything_before_they_write() -> None:
    pool = jnp.arange(5.0).reshape(5, 1, 1, 1)
    cache = (LayerKV(pool, 10 * pool), LayerKV(-pool, pool))
    sources, destinations = jnp.array([1, 2, 0], jnp.int32), jnp.array([2, 3, 9], jnp.int32)
    first, second = apply_moves(cache, sources, destinations)
    np.testing.assert_array_equal(np.ravel(first.k), [0, 1, 1, 2, 4])
    np.testing.assert_array_equal(np.ravel(first.v), [0, 10, 10, 20, 40])
    np.testing.assert_array_equal(np.ravel(second.k), [0, -1, -1, -2, -4])


def _assert_in_place(lowered: jax.stages.Lowered, pool: jax.ShapeDtypeStruct) -> None:
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * pool.size * 4
    assert memory.temp_size_in_bytes < pool.size * 4 // 10
