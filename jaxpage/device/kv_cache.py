"""The KV pool on the device: making it, writing one step into it, copying blocks inside it.

It knows arrays and slots only: which sequence a block belongs to is the host's business.

    num_blocks 3, block_size 4    block   0 (null)   1          2          3
    P = 4                         slots   0 .. 3     4 .. 7     8 .. 11    12 .. 15
    dropped writes                slots >= P * S = 16, blocks >= P
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jaxpage.config import ModelConfig
from jaxpage.device.types import KVCache, LayerKV
from jaxpage.errors import ConfigError
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@own_constants()
def init_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str | None = None
) -> KVCache:
    """An empty pool of `num_blocks` blocks and the null block, in the model's dtype or `dtype`.

    The arrays are fresh and distinct, so that a jitted step may take them as donated.
    """
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ConfigError(f"got {name}={value}, wanted at least 1; change {name}")
    shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
    kind = jnp.dtype(dtype or config.dtype)
    return tuple(
        LayerKV(k=jnp.zeros(shape, kind), v=jnp.zeros(shape, kind))
        for _ in range(config.num_layers)
    )


def block_bytes(config: ModelConfig, block_size: int, dtype: str | None = None) -> int:
    """Bytes of one block over all layers, K and V."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * jnp.dtype(dtype or config.dtype).itemsize


@own_constants()
def write_kv(
    layer_kv: LayerKV, k: Float[Array, "T K H"], v: Float[Array, "T K H"], slots: Int[Array, "T"]
) -> LayerKV:
    """The layer with each token's K and V at its slot; slots >= P * S are dropped.

    All slots must differ, those of padding too: then the scatter needs no atomics on a GPU, and
    with a donated cache it happens in place.
    """
    return LayerKV(
        k=_scatter(layer_kv.k, k, slots), v=_scatter(layer_kv.v, v, slots), scales=layer_kv.scales
    )


@own_constants()
def apply_moves(cache: KVCache, sources: Int[Array, "C"], destinations: Int[Array, "C"]) -> KVCache:
    """The pool after copying whole blocks in every layer; all are read before any is written.

    Destinations must differ from each other. Padding copies from block 0 to distinct
    destinations >= P, which are dropped.
    """

    def copied(pool: Array) -> Array:
        return _set_rows(pool, destinations, pool.at[sources].get(mode="promise_in_bounds"))

    return tuple(
        LayerKV(k=copied(layer.k), v=copied(layer.v), scales=layer.scales) for layer in cache
    )


@own_constants()
def gather_blocks(cache: KVCache, ids: Int[Array, "C"]) -> Float[Array, "C L 2 S K H"]:
    """Whole blocks of every layer, K and V, as one array: one transfer takes them to the host."""

    def taken(pool: Array) -> Array:
        return pool.at[ids].get(mode="promise_in_bounds")

    layers = [jnp.stack([taken(layer.k), taken(layer.v)], axis=1) for layer in cache]
    return jnp.stack(layers, axis=1)


@own_constants()
def scatter_blocks(
    cache: KVCache, blocks: Float[Array, "C L 2 S K H"], ids: Int[Array, "C"]
) -> KVCache:
    """The pool with `blocks` written at `ids`, all distinct; ids >= P are padding and dropped."""
    return tuple(
        LayerKV(
            k=_set_rows(layer.k, ids, blocks[:, index, 0]),
            v=_set_rows(layer.v, ids, blocks[:, index, 1]),
            scales=layer.scales,
        )
        for index, layer in enumerate(cache)
    )


def _scatter(pool: Array, rows: Array, slots: Array) -> Array:
    num_blocks, block_size, num_heads, head_dim = pool.shape
    flat = pool.reshape(num_blocks * block_size, num_heads, head_dim)
    return _set_rows(flat, slots, rows.astype(pool.dtype)).reshape(pool.shape)


def _set_rows(pool: Array, index: Array, rows: Array) -> Array:
    if index.shape[0] == 1:
        # XLA makes a slice update of a scatter of one row, and that copies the whole pool.
        rows = jnp.concatenate([rows, rows])
        index = jnp.append(index, jnp.int32(jnp.iinfo(jnp.int32).max))  # dropped
    return pool.at[index].set(rows, mode="drop", unique_indices=True)
