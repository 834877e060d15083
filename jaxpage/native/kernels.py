"""The kernels as JAX functions: checks what they are called with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpage.errors import ConfigError
from jaxpage.native.library import require

FEW_ROWS = 64
"""Products of up to so many rows multiply while w is read; with more, w is turned to columns first
and a sum is added up in another order (kFewRows in kernels.h)."""
WEIGHTS = (jnp.float32, jnp.bfloat16)
"""Dtypes of weights and pools; everything else is float32."""
WIDEST_WINDOW = 2**40
"""In positions; one as wide hides none."""


def product(x: Array, w: Array) -> Array:
    """x [M, D] times w [O, D] transposed: float32 [M, O].

    x is cast to float32; w is float32 or bfloat16. A row of y depends on its row of x alone, to the
    bit, whatever the number of threads and M up to FEW_ROWS, and so among larger M. Raises
    ConfigError for other shapes or dtypes.
    """
    require()
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ConfigError(f"got x {x.shape} and w {w.shape}, wanted [M, D] and [O, D]; reshape")
    _check_dtype("w", w)
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
    call = _call("jaxpage_product", _float32((x.shape[0], w.shape[0])))
    return call(x.astype(jnp.float32), w)


def norm(x: Array, scale: Array, *, eps: float) -> Array:
    """x / rms(x) * scale of rows x [T, D]: float32 [T, D]. Raises ConfigError for other shapes."""
    require()
    if x.ndim != 2 or scale.shape != x.shape[1:]:
        raise ConfigError(f"got x {x.shape} and scale {scale.shape}, wanted [T, D] and [D]")
    call = _call("jaxpage_norm", _float32(x.shape))
    return call(x.astype(jnp.float32), scale.astype(jnp.float32), eps=np.float32(eps))


def gate(x: Array) -> Array:
    """silu(a) * b of rows x [T, 2 F], a the first half and b the second: float32 [T, F].

    Denormal numbers, silu(a) among them, count as zero, as in XLA on a CPU. Raises ConfigError for
    other shapes.
    """
    require()
    if x.ndim != 2 or x.shape[1] % 2:
        raise ConfigError(f"got x {x.shape}, wanted [T, 2 F]")
    call = _call("jaxpage_gate", _float32((x.shape[0], x.shape[1] // 2)))
    return call(x.astype(jnp.float32))


def rotate(qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    """(q [T, K G, H], k [T, K, H], v [T, K, H]) of qkv [T, K, G + 2, H], all float32.

    Pairs (i, i + H / 2) of q and k are turned by their token's angle i: cos, sin [T, H / 2].
    Raises ConfigError for other shapes.
    """
    require()
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2:
        raise ConfigError(f"got qkv {qkv.shape}, wanted [T, K, G + 2, H] with H even")
    tokens, heads, many, size = qkv.shape
    if cos.shape != (tokens, size // 2) or sin.shape != cos.shape:
        raise ConfigError(f"got cos {cos.shape} and sin {sin.shape}, wanted {(tokens, size // 2)}")
    kv = _float32((tokens, heads, size))
    call = _call("jaxpage_rotate", (_float32((tokens, heads * (many - 2), size)), kv, kv))
    q, k, v = call(*(each.astype(jnp.float32) for each in (qkv, cos, sin)))
    return q, k, v


def summarise(x: Array) -> tuple[Array, Array]:
    """Of rows x [R, V]: (int32 [R] index of the largest, float32 [R] log of the sum of exp(x)).

    The first of equals, and of NaNs where a row has any; a row's figures depend on it alone.
    Raises ConfigError for other shapes.
    """
    require()
    if x.ndim != 2 or x.shape[1] < 1:
        raise ConfigError(f"got x {x.shape}, wanted [R, V] with V at least 1")
    index = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    call = _call("jaxpage_summarise", (index, _float32(x.shape[:1])))
    largest, log_sum_exp = call(x.astype(jnp.float32))
    return largest, log_sum_exp


def paged_attention(
    q: Array,
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    *,
    slots: Array,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
    scale: float,
    sliding_window: int | None = None,
    shares_prefixes: bool = True,
) -> tuple[Array, Array, Array]:
    """(attention of q [T, N, H], the pools [P, S, K, H] with this step's k and v [T, K, H]).

    Token t is stored at slots[t] first; slots beyond P * S are dropped. Row b has queries
    query_starts[b]:query_starts[b + 1], the last of its context_lens[b] tokens, in the blocks
    block_tables[b] (int32 [T], [B, M], [B], [B + 1]). Rows without context and tokens without row
    get 0. A token's result depends on its own row alone, to the bit, however the row was cut into
    steps; blocks that rows of one token begin with in common are read once with
    `shares_prefixes`. The result is float32;
    donated pools are updated in place. Raises ConfigError for other shapes or dtypes.
    """
    require()
    rows = (slots, block_tables, context_lens, query_starts)
    _check_attention(q, k, v, k_pool, v_pool)
    _check_rows(q.shape[0], *rows)
    window = WIDEST_WINDOW if sliding_window is None else min(sliding_window, WIDEST_WINDOW)
    if window < 1:
        raise ConfigError(f"got sliding_window={sliding_window}, wanted at least 1 or None")
    pool = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype)
    call = _call(
        "jaxpage_attention", (_float32(q.shape), pool, pool), input_output_aliases={3: 1, 4: 2}
    )
    heads = (each.astype(jnp.float32) for each in (q, k, v))
    sees = {"scale": np.float32(scale), "window": np.int64(window)}
    out, *pools = call(*heads, k_pool, v_pool, *rows, **sees, shares_prefixes=shares_prefixes)
    return out, pools[0], pools[1]


def _call(name: str, result: Any, **how: Any) -> Any:
    """The kernel as a function; under `jax.vmap` it is called for one entry after another."""
    return jax.ffi.ffi_call(name, result, vmap_method="sequential", **how)


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _check_attention(q: Array, k: Array, v: Array, k_pool: Array, v_pool: Array) -> None:
    _check_dtype("k_pool", k_pool)
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ConfigError(
            f"got k_pool {k_pool.dtype}{k_pool.shape} and v_pool {v_pool.dtype}{v_pool.shape}, "
            "wanted the same"
        )
    if (
        q.ndim != 3
        or k_pool.ndim != 4
        or q.shape[2] != k_pool.shape[3]
        or 0 in k_pool.shape[:3]
        or q.shape[1] % k_pool.shape[2]
    ):
        raise ConfigError(
            f"got q {q.shape} and pools {k_pool.shape}, wanted [T, N, H] and [P, S, K, H] with N "
            "a multiple of K, and P, S and K at least 1"
        )
    if k.shape != (q.shape[0], *k_pool.shape[2:]) or v.shape != k.shape:
        raise ConfigError(
            f"got k {k.shape} and v {v.shape}, wanted {(q.shape[0], *k_pool.shape[2:])}"
        )


def _check_rows(
    num_tokens: int, slots: Array, tables: Array, context_lens: Array, query_starts: Array
) -> None:
    rows = tables.shape[0]
    shapes = (tables.ndim, slots.shape, context_lens.shape, query_starts.shape)
    if shapes != (2, (num_tokens,), (rows,), (rows + 1,)):
        raise ConfigError(
            f"got slots {slots.shape}, block_tables {tables.shape}, context_lens "
            f"{context_lens.shape} and query_starts {query_starts.shape}, wanted [T], [B, M], [B] "
            "and [B + 1]"
        )
    for each in (slots, tables, context_lens, query_starts):
        if each.dtype != jnp.int32:
            raise ConfigError(f"got {each.dtype} slots, tables, lengths or starts, wanted int32")


def _check_dtype(name: str, array: Array) -> None:
    if array.dtype not in WEIGHTS:
        raise ConfigError(f"got {name} of {array.dtype}, wanted float32 or bfloat16; cast it")
