"""The oracle's attention, gather and softmax: slow, short, and differentiable in the parameters."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from jaxpage.backends.xla import Xla
from jaxpage.config import AttentionSpec
from jaxpage.device.attention.reference import attend_reference
from jaxpage.device.attention.store import store_then_attend
from jaxpage.device.types import LayerKV, StepInput


@dataclass(frozen=True)
class Reference(Xla):
    """The oracle's attention; all other operations are plain XLA."""

    @property
    def reads_groups(self) -> bool:
        return False

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
        return store_then_attend(q, k, v, layer_kv, step, attend=attend_reference, spec=spec)
