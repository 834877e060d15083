"""Programs with a mistake made on purpose: the check must refuse each of them.

`toy_step` is also the smallest whole step: L layers that write into the pool, attend and multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import paged_decode_attention, write_kv
from pallas_kernels.check.cards import Card
from pallas_kernels.check.program import Program
from pallas_kernels.check.shapes import BLOCK_SIZE, MODELS, Heads, decode, prefill

ROWS, WIDTH, LAYERS = 32, 128, 4
HEADS = Heads("toy", 32, 8, 128)


def toy_step(card: Card) -> Program:
    """A sound step, for comparison: pools a tuple over layers, donated, layers unrolled."""
    pools = tuple(_layer_pool() for _ in range(2 * LAYERS))
    kernel = decode(HEADS, card, rows=ROWS, tokens=WIDTH * BLOCK_SIZE).kernels
    weights = tuple(_weight() for _ in range(LAYERS))
    return Program(
        "toy step",
        _unrolled,
        (pools, weights, *_inputs()),
        donated=(0,),
        kernels=kernel,
        pools=pools,
        weight_bytes=sum(weight.size * weight.dtype.itemsize for weight in weights),
        is_step=True,
    )


def _spilling_tile(card: Card) -> Program:
    """A query tile of 256 rows for 4 warps: its accumulators alone are more than the registers."""
    wide = replace(MODELS[0].tuning("prefill", card), query_rows=256, block_k=128, num_warps=4)
    return replace(prefill(MODELS[0], card, tuning=wide), name="fault: spilling tile")


def _narrow_load(card: Card) -> Program:
    """A tile of 16 tokens for 8 warps: each thread has only 8 bytes to read."""
    narrow = replace(MODELS[3].tuning("decode", card), block_k=16, num_warps=8)
    return replace(decode(MODELS[3], card, tuning=narrow), name="fault: narrow load")


def _undonated_pool(card: Card) -> Program:
    return replace(toy_step(card), name="fault: un-donated pool", donated=())


def _layer_scan(card: Card) -> Program:
    """The pools as a scan's inputs and outputs, a layer at each step: it copies them."""
    sound = toy_step(card)
    layer = _layer_pool()
    stacked = jax.ShapeDtypeStruct((LAYERS, *layer.shape), layer.dtype)
    weight = _weight()
    weights = jax.ShapeDtypeStruct((LAYERS, *weight.shape), weight.dtype)
    return replace(
        sound,
        name="fault: scan over layers",
        function=_scanned,
        arguments=((stacked, stacked), weights, *_inputs()),
        pools=(stacked, stacked),
    )


FAULTS: dict[str, Callable[[Card], Program]] = {
    "spilling-tile": _spilling_tile,
    "narrow-load": _narrow_load,
    "undonated-pool": _undonated_pool,
    "layer-scan": _layer_scan,
}


def _unrolled(pools: Any, weights: Any, x: Array, tables: Array, lens: Array, slots: Array) -> Any:
    new = []
    for layer, weight in enumerate(weights):
        k, v, x = _layer(pools[2 * layer], pools[2 * layer + 1], weight, x, tables, lens, slots)
        new += [k, v]
    return tuple(new), x


def _scanned(pools: Any, weights: Any, x: Array, tables: Array, lens: Array, slots: Array) -> Any:
    def turn(x: Array, layer: Any) -> Any:
        k_pool, v_pool, weight = layer
        k, v, x = _layer(k_pool, v_pool, weight, x, tables, lens, slots)
        return x, (k, v)

    x, pools = lax.scan(turn, x, (*pools, weights))
    return pools, x


def _layer(
    k_pool: Array, v_pool: Array, weight: Array, x: Array, tables: Array, lens: Array, slots: Array
) -> tuple[Array, Array, Array]:
    heads, kv, dim = HEADS.num_heads, HEADS.num_kv_heads, HEADS.head_dim
    qkv = (x @ weight).reshape(ROWS, heads + 2 * kv, dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
    pool = write_kv(k_pool, v_pool, k, v, slots)
    out = paged_decode_attention(q, pool.k, pool.v, tables, lens, scale=dim**-0.5, interpret=False)
    assert isinstance(out, Array)
    return pool.k, pool.v, x + out.reshape(x.shape)


def _layer_pool() -> jax.ShapeDtypeStruct:
    shape = (ROWS * WIDTH + 1, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _weight() -> jax.ShapeDtypeStruct:
    hidden = HEADS.num_heads * HEADS.head_dim
    out = hidden + 2 * HEADS.num_kv_heads * HEADS.head_dim
    return jax.ShapeDtypeStruct((hidden, out), jnp.bfloat16)


def _inputs() -> tuple[jax.ShapeDtypeStruct, ...]:
    hidden = HEADS.num_heads * HEADS.head_dim
    return (
        jax.ShapeDtypeStruct((ROWS, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
