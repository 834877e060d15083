"""The pool's update happens in place, whatever the number of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpage.device.kv_cache import write_kv
from jaxpage.device.types import LayerKV


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_a_donated_pool_is_never_copied(num_tokens: int) -> None:
    pool = jax.ShapeDtypeStruct((512, 16, 2, 8), jnp.float32)
    rows = jax.ShapeDtypeStruct((num_tokens, 2, 8), jnp.float32)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    lowered = jax.jit(write_kv, donate_argnums=0).lower(LayerKV(pool, pool), rows, rows, slots)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * pool.size * 4
    assert memory.temp_size_in_bytes < pool.size * 4 // 10
