"""The kernels as JAX functions: loads the shared object once and checks what it is called with."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpage.errors import ConfigError

MISSING = (
    "native CPU kernels are not built, so this runs in plain XLA, up to twice as slow; "
    "install with a C++ compiler at hand (in a checkout: python setup.py build_ext --inplace)"
)
"""The one line that whoever falls back shows."""
INTERFACE = 1
"""Counts the changes of what ffi.cpp exports and takes; a library of another count is not used."""
WEIGHTS = (jnp.float32, jnp.bfloat16)
"""Dtypes of weights and pools; everything else is float32."""


@cache
def is_built() -> bool:
    """Whether the kernels can be called in this installation."""
    return _library() is not None


def instruction_set() -> str:
    """Which of its forms the library runs on this processor: avx512, avx2 or portable."""
    name = _require().jaxpage_instruction_set
    name.restype = ctypes.c_char_p
    return name().decode()


def product(x: Array, w: Array) -> Array:
    """x [M, D] times w [O, D] transposed: float32 [M, O], multiplied while w is read.

    x is cast to float32; w is float32 or bfloat16. A row of y depends on its row of x alone, to the
    bit, whatever M and the number of threads. Raises ConfigError for other shapes or dtypes.
    """
    _require()
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ConfigError(f"got x {x.shape} and w {w.shape}, wanted [M, D] and [O, D]; reshape")
    _check_dtype("w", w)
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("jaxpage_product", shape)(x.astype(jnp.float32), w)


def paged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    *,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
    scale: float,
    sliding_window: int | None = None,
) -> Array:
    """Attention of q [T, N, H] over pools [P, S, K, H] that already hold this step's K and V.

    Row b has queries query_starts[b]:query_starts[b + 1], the last of its context_lens[b]
    tokens, in the blocks block_tables[b] (int32 [B, M], [B], [B + 1]). Rows without context and
    tokens without row get 0. A token's result depends on its own row alone, to the bit, however
    the row was cut into steps. The result is float32. Raises ConfigError for other shapes or
    dtypes.
    """
    _require()
    _check_attention(
        q,
        k_pool,
        v_pool,
        tables=block_tables,
        context_lens=context_lens,
        query_starts=query_starts,
    )
    if sliding_window is not None and sliding_window < 1:
        raise ConfigError(f"got sliding_window={sliding_window}, wanted at least 1 or None")
    call = jax.ffi.ffi_call("jaxpage_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q.astype(jnp.float32),
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        query_starts,
        scale=np.float32(scale),
        window=np.int64(2**40 if sliding_window is None else sliding_window),
    )


def _check_attention(
    q: Array, k: Array, v: Array, *, tables: Array, context_lens: Array, query_starts: Array
) -> None:
    _check_dtype("k_pool", k)
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ConfigError(
            f"got k_pool {k.dtype}{k.shape} and v_pool {v.dtype}{v.shape}, wanted the same"
        )
    if q.ndim != 3 or k.ndim != 4 or q.shape[2] != k.shape[3] or q.shape[1] % k.shape[2]:
        raise ConfigError(
            f"got q {q.shape} and pools {k.shape}, wanted [T, N, H] and [P, S, K, H] with N a "
            "multiple of K"
        )
    rows = tables.shape[0]
    shapes = (tables.ndim, context_lens.shape, query_starts.shape)
    if shapes != (2, (rows,), (rows + 1,)):
        raise ConfigError(
            f"got block_tables {tables.shape}, context_lens {context_lens.shape} and query_starts "
            f"{query_starts.shape}, wanted [B, M], [B] and [B + 1]"
        )
    for each in (tables, context_lens, query_starts):
        if each.dtype != jnp.int32:
            raise ConfigError(f"got {each.dtype} tables, lengths or starts, wanted int32; cast")


def _check_dtype(name: str, array: Array) -> None:
    if array.dtype not in WEIGHTS:
        raise ConfigError(f"got {name} of {array.dtype}, wanted float32 or bfloat16; cast it")


def _require() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise ConfigError(f"got a call of a native kernel, wanted it built: {MISSING}")
    return library


@cache
def _library() -> ctypes.CDLL | None:
    """The shared object, its functions registered with XLA; None where it is not built."""
    library = next(_libraries(), None)
    if library is not None:
        for name in ("jaxpage_product", "jaxpage_attention"):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return library


def _libraries() -> Iterator[ctypes.CDLL]:
    """What is built here, then what the installed package has: a checkout runs with that."""
    for folder in (str(Path(__file__).parent), *(f"{path}/jaxpage/native" for path in sys.path)):
        found = PathFinder.find_spec("_kernels", [folder])
        if found is not None and found.origin is not None:
            library = ctypes.CDLL(found.origin)
            tells = getattr(library, "jaxpage_interface", None)  # what is older does not
            if tells is not None and tells() == INTERFACE:
                yield library
