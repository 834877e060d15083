"""The kernels as JAX functions, which check shapes and dtypes before the call.

Each casts what it takes to float32, but for weights and pools, and gives float32. Axes: T tokens, B
rows, P blocks of S slots in a pool, N query heads, K KV heads, G = N / K, H numbers of a head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpage.errors import ConfigError
from jaxpage.native.library import require

FEW_ROWS = 64
"""`matmul` of up to so many rows adds a sum up in one order, and of more rows in another: it then
transposes w first (kFewRows in kernels.h)."""
WEIGHTS = (jnp.float32, jnp.bfloat16)
"""Dtypes of weights and pools."""
WIDEST_WINDOW = 2**40
"""Positions; a window that wide hides none."""


def matmul(x: Array, w: Array) -> Array:
    """x [M, D] times w [O, D] transposed: float32 [M, O].

    w is float32 or bfloat16. A row of the result depends on its row of x alone: it is the same to
    the bit for any number of threads and any M up to FEW_ROWS, and again for any M beyond.
    Raises ConfigError for other shapes or dtypes.
    """
    require()
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ConfigError(f"got x {x.shape} and w {w.shape}, wanted [M, D] and [O, D]; reshape")
    _check_dtype("w", w)
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
    call = _call("jaxpage_matmul", _float32((x.shape[0], w.shape[0])))
    return call(x.astype(jnp.float32), w)


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    """x / sqrt(mean(x * x) + eps) * scale of each row of x [T, D]: float32 [T, D].

    scale is [D]. Raises ConfigError for other shapes.
    """
    require()
    if x.ndim != 2 or scale.shape != x.shape[1:]:
        raise ConfigError(f"got x {x.shape} and scale {scale.shape}, wanted [T, D] and [D]")
    call = _call("jaxpage_rms_norm", _float32(x.shape))
    return call(x.astype(jnp.float32), scale.astype(jnp.float32), eps=np.float32(eps))


def swiglu(x: Array) -> Array:
    """silu(a) * b, where a is the first half and b the second of x [T, 2 F]: float32 [T, F].

    Denormal numbers count as zero, silu(a) too, as in XLA on a CPU. Raises ConfigError for other
    shapes.
    """
    require()
    if x.ndim != 2 or x.shape[1] % 2:
        raise ConfigError(f"got x {x.shape}, wanted [T, 2 F]")
    call = _call("jaxpage_swiglu", _float32((x.shape[0], x.shape[1] // 2)))
    return call(x.astype(jnp.float32))


def rope_qkv(qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    """Splits qkv [T, K, G + 2, H] into float32 (q [T, K G, H], k [T, K, H], v [T, K, H]).

    q and k get their rotary positions: entries i and i + H / 2 of a head are rotated by angle i of
    the token, given as cos and sin [T, H / 2]. Raises ConfigError for other shapes.
    """
    require()
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2:
        raise ConfigError(f"got qkv {qkv.shape}, wanted [T, K, G + 2, H] with H even")
    tokens, heads, many, size = qkv.shape
    if cos.shape != (tokens, size // 2) or sin.shape != cos.shape:
        raise ConfigError(f"got cos {cos.shape} and sin {sin.shape}, wanted {(tokens, size // 2)}")
    kv = _float32((tokens, heads, size))
    call = _call("jaxpage_rope_qkv", (_float32((tokens, heads * (many - 2), size)), kv, kv))
    q, k, v = call(*(each.astype(jnp.float32) for each in (qkv, cos, sin)))
    return q, k, v


def argmax_logsumexp(x: Array) -> tuple[Array, Array]:
    """Of logits x [R, V]: (argmax int32 [R], natural logarithm of the sum of exp(x) float32 [R]).

    The argmax is the first of equals, or the first NaN of a row that has one. A row's results
    depend on that row alone. Raises ConfigError for other shapes.
    """
    require()
    if x.ndim != 2 or x.shape[1] < 1:
        raise ConfigError(f"got x {x.shape}, wanted [R, V] with V at least 1")
    index = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    call = _call("jaxpage_argmax_logsumexp", (index, _float32(x.shape[:1])))
    argmax, logsumexp = call(x.astype(jnp.float32))
    return argmax, logsumexp


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
    """Stores a step's k and v in the pools, then attends: (float32 [T, N, H], k_pool, v_pool).

    q [T, N, H]; k and v [T, K, H]; the pools [P, S, K, H], float32 or bfloat16, updated in place
    where they are donated. slots int32 [T]: where each token is stored, block * S + offset; tokens
    whose slot is outside of the pool are dropped. query_starts int32 [B + 1], context_lens int32
    [B], block_tables int32 [B, M]: row b has the queries query_starts[b]:query_starts[b + 1], the
    last of its context_lens[b] tokens, which lie in the blocks block_tables[b]. A query sees tokens
    up to its own, the last `sliding_window` of them or with None all. Rows without context, and
    tokens of no row, get 0.

    A token's result depends on its own row alone and is the same to the bit however the row is cut
    into steps. `shares_prefixes`: blocks that rows of one token have in common at their beginning
    are read once, which changes no bit. Raises ConfigError for other shapes or dtypes.
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
    """The custom call `name` as a function; `jax.vmap` calls it for one entry after another."""
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
