"""Attention by the kernels of pallas_kernels: compiled on NVIDIA GPUs, interpreted elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jax import Array

from jaxpage.backends.xla import Xla
from jaxpage.config import AttentionSpec
from jaxpage.device.attention.store import store_then_attend
from jaxpage.device.types import LayerKV, StepInput
from pallas_kernels.decode import paged_decode_attention
from pallas_kernels.prefill import paged_prefill_attention
from pallas_kernels.shared_prefix import shared_prefix_decode_attention


@dataclass(frozen=True)
class Pallas(Xla):
    """The attention kernels; all other operations are plain XLA."""

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        layer_kv: LayerKV,
        step: StepInput,
        *,
        spec: AttentionSpec,
    ) -> tuple[Array, LayerKV]:
        return store_then_attend(q, k, v, layer_kv, step, attend=attend_pallas, spec=spec)


def attend_pallas(q: Array, layer_kv: LayerKV, step: StepInput, spec: AttentionSpec) -> Array:
    """What `attend_reference` computes; leading blocks that rows share are read once."""
    pool = (layer_kv.k, layer_kv.v, step.block_tables, step.context_lens)
    groups = (step.group_rows, step.prefix_lens)
    if not step.is_decode:
        attend = partial(paged_prefill_attention, q, *pool, step.query_starts)
    elif step.group_rows is None:
        attend = partial(paged_decode_attention, q, *pool)
    else:
        attend = partial(shared_prefix_decode_attention, q, *pool, *groups)
    out = attend(scale=spec.scale, sliding_window=spec.window, soft_cap=spec.soft_cap)
    assert isinstance(out, Array), type(out)  # no log-sum-exp was asked for
    return out
