"""What is timed beside the kernels: cuDNN's paged decode attention, dense attention.

A peer that is not there is no failure: its entry says what is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.gpu.timing import seconds_of

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
"""Private: JAX shows cuDNN's paged attention nowhere else, so it may be missing or moved."""
WHAT_MAY_BE_MISSING = (ImportError, AttributeError, RuntimeError, TypeError, ValueError)
"""A module, a function, cuDNN itself, an argument of another JAX, support of this shape."""


def decode_peers(
    q: Array, pools: tuple[Array, Array], tables: Array, lens: Array, *, min_seconds: float
) -> dict[str, dict[str, Any]]:
    """By name: {"us"} or {"missing"}, for one decode call over full rows. q [B, N, H].

    Dense attention reads K and V that lie in order, [B, S, K, H]: what paging costs is the
    difference.
    """
    dense = [pool[tables].reshape(q.shape[0], -1, *pool.shape[2:]) for pool in pools]
    return {
        "cuDNN paged": _timed(cudnn_paged, q, *pools, tables, lens, min_seconds=min_seconds),
        _dense_name(): _timed(dense_decode, q, *dense, min_seconds=min_seconds),
    }


def prefill_peers(q: Array, k: Array, v: Array, *, min_seconds: float) -> dict[str, dict[str, Any]]:
    """The same of causal attention over one prompt; q [T, N, H], k and v [T, K, H]."""
    return {_dense_name(): _timed(dense_prefill, q, k, v, min_seconds=min_seconds)}


def cudnn_paged(q: Array, k_pool: Array, v_pool: Array, tables: Array, lens: Array) -> Array:
    """Decode attention [B, N, H] by cuDNN over the same pool, whose blocks are all in the tables.

    RuntimeError where there is no cuDNN.
    """
    module = importlib.import_module(CUDNN)
    table = tables[:, None, :, None]  # [B, 1, M, 1]
    out = module.paged_attention(
        q[:, None],  # [B, 1, N, H]
        k_pool,
        v_pool,
        jnp.ones_like(lens),
        lens,
        table,
        table,
        scale=q.shape[-1] ** -0.5,
        mask_type=module.MaskType.PADDING,
    )
    return (out[0] if isinstance(out, (list, tuple)) else out)[:, 0]


def dense_decode(q: Array, k: Array, v: Array) -> Array:
    """Attention [B, N, H] of one query a row over keys [B, S, K, H]."""
    return _dense(q[:, None], k, v, is_causal=False)[:, 0]


def dense_prefill(q: Array, k: Array, v: Array) -> Array:
    """Causal attention [T, N, H] of one prompt over keys [T, K, H]."""
    return _dense(q[None], k[None], v[None], is_causal=True)[0]


def _dense(q: Array, k: Array, v: Array, *, is_causal: bool) -> Array:
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code needs it
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, implementation=_implementation()
        )


def _implementation() -> Any:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def _dense_name() -> str:
    return "cuDNN dense" if jax.default_backend() == "gpu" else "XLA dense"


def _timed(function: Callable[..., Array], *arrays: Array, min_seconds: float) -> dict[str, Any]:
    try:
        return {"us": seconds_of(jax.jit(function), *arrays, min_seconds=min_seconds) * 1e6}
    except WHAT_MAY_BE_MISSING as error:
        return {"missing": str(error).partition("\n")[0] or type(error).__name__}
