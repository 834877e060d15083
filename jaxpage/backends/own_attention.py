"""XLA's operations around an attention function of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array

from jaxpage.backends.xla import Xla
from jaxpage.config import AttentionSpec
from jaxpage.device.types import LayerKV, StepInput

Attention = Callable[[Array, Array, Array, LayerKV, StepInput], tuple[Array, LayerKV]]
"""(q [T, N, H], k [T, K, H], v [T, K, H], layer_kv, step) -> (out [T, N, H], layer_kv)

It stores k and v in layer_kv, and knows the scale, mask and window of its model."""


@dataclass(frozen=True)
class OwnAttention(Xla):
    """What `functional.forward` makes of a function."""

    function: Attention | None = None

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
        assert self.function is not None, "no attention function"
        return self.function(q, k, v, layer_kv, step)
