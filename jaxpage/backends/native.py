"""The native CPU kernels: faster on a CPU, where they are built; not differentiable."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxpage import native
from jaxpage.backends.xla import Xla, add_bias
from jaxpage.config import AttentionSpec
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.weights import Quantized, Weight


@dataclass(frozen=True)
class Native(Xla):
    """The kernels where they apply; float16, quantised weights and soft caps go to plain XLA."""

    @property
    def reads_groups(self) -> bool:
        """False: the kernel itself finds in the tables which leading blocks rows share."""
        return False

    @property
    def pays_for_padding(self) -> bool:
        """True: products take longer with every row, and the programs compile in about a second."""
        return True

    def linear(
        self, x: Array, w: Weight, bias: Array | None = None, *, dtype: jnp.dtype | None = None
    ) -> Array:
        """A row's result is the same to the bit for any number of rows up to `native.FEW_ROWS`, and
        among larger ones."""
        if isinstance(w, Quantized) or w.dtype == jnp.float16:
            return super().linear(x, w, bias, dtype=dtype)
        y = native.matmul(x, w.reshape(-1, w.shape[-1])).astype(dtype or x.dtype)
        return add_bias(y, bias)

    def rms_norm(self, x: Array, scale: Array, *, eps: float) -> Array:
        return native.rms_norm(x, scale, eps=eps).astype(x.dtype)

    def swiglu(self, x: Array) -> Array:
        """Computed in float32, returned in x's dtype."""
        return native.swiglu(x).astype(x.dtype)

    def rope_qkv(self, qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """One kernel; in plain XLA the cosines would be computed again in every layer."""
        q, k, v = (each.astype(qkv.dtype) for each in native.rope_qkv(qkv, cos, sin))
        return q, k, v

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
        """A token's result is the same to the bit in any batch and however its row was cut into
        steps. Mixed steps are not split."""
        if spec.soft_cap is not None or layer_kv.k.dtype == jnp.float16:
            return super().attention(q, k, v, layer_kv, step, spec=spec)
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
            scale=spec.scale,
            sliding_window=spec.window,
            shares_prefixes=self.shares_prefixes,
        )
        return out.astype(q.dtype), LayerKV(k=k_pool, v=v_pool, scales=layer_kv.scales)

    def argmax_logsumexp(self, logits: Array) -> tuple[Array, Array]:
        return native.argmax_logsumexp(logits)
