"""Attention by the kernels of pallas_kernels: compiled on NVIDIA GPUs, interpreted elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from jax import Array

from jaxpage.device.types import LayerKV, StepInput
from pallas_kernels.decode import paged_decode_attention
from pallas_kernels.prefill import paged_prefill_attention
from pallas_kernels.shared_prefix import shared_prefix_decode_attention

if TYPE_CHECKING:
    from jaxtyping import Float


def attend_pallas(
    q: Float[Array, "T N H"],
    layer_kv: LayerKV,
    step: StepInput,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "T N H"]:
    """What `attend_reference` computes; leading blocks that rows share are read once."""
    pool = (layer_kv.k, layer_kv.v, step.block_tables, step.context_lens)
    groups = (step.group_rows, step.prefix_lens)
    if not step.is_decode:
        attend = partial(paged_prefill_attention, q, *pool, step.query_starts)
    elif step.group_rows is None:
        attend = partial(paged_decode_attention, q, *pool)
    else:
        attend = partial(shared_prefix_decode_attention, q, *pool, *groups)
    out = attend(scale=scale, sliding_window=sliding_window)
    assert isinstance(out, Array), type(out)  # no log-sum-exp was asked for
    return out
