"""Attention by the native CPU kernels: one call stores a step's K and V and attends to the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jaxpage import native
from jaxpage.device.types import LayerKV, StepInput

if TYPE_CHECKING:
    from jaxtyping import Float


def takes_native(layer_kv: LayerKV) -> bool:
    """Whether the kernels read this pool."""
    return layer_kv.k.dtype != jnp.float16


def attend_native(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layer_kv: LayerKV,
    step: StepInput,
    *,
    scale: float,
    sliding_window: int | None = None,
    shares_prefixes: bool = True,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """(what `attend_reference` computes, the layer with k and v stored), on CPUs only.

    A token's result is the same to the bit in any batch and however its row was cut into steps.
    Mixed steps are taken whole, and leading blocks that rows share are found in their tables.
    """
    out, k_pool, v_pool = native.paged_attention(
        q,
        k,
        v,
        layer_kv.k,
        layer_kv.v,
        slots=step.slots,
        block_tables=step.block_tables,
        context_lens=step.context_lens,
        query_starts=step.query_starts,
        scale=scale,
        sliding_window=sliding_window,
        shares_prefixes=shares_prefixes,
    )
    return out.astype(q.dtype), LayerKV(k=k_pool, v=v_pool, scales=layer_kv.scales)
