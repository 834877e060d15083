"""The functional core: one forward pass and one draw, as pure functions of pytrees.

The caller chooses jit, grad, donation and sharding; the engine's own programs are in
`jaxpage.device.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import Array

from jaxpage.backends import as_backend
from jaxpage.backends.xla import Xla
from jaxpage.config import AttentionSpec
from jaxpage.device.ops import Adapters, Backend, Model
from jaxpage.device.sampling.settings import greedy_sampling
from jaxpage.device.step import draw, hidden_of, read_hidden
from jaxpage.device.types import KVCache, LayerKV, SamplingInput, StepInput, StepOutput
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float

Attention = Callable[[Array, Array, Array, LayerKV, StepInput], tuple[Array, LayerKV]]
"""(q [T, N, H], k [T, K, H], v [T, K, H], layer_kv, step) -> (out [T, N, H], layer_kv)

It stores k and v in layer_kv, and knows the scale, mask and window of its model."""


@own_constants()
def forward(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    *,
    attention: str | Backend | Attention = "xla",
    adapters: Adapters | None = None,
) -> tuple[KVCache, Float[Array, "R V"]]:
    """(the cache with this step's K and V, float32 logits [R, V] at `step.logit_index`).

    `attention`: a backend or its name, or a function that replaces XLA's attention; "reference"
    makes the pass differentiable in `params`. `adapters`: those that `step.adapters` numbers.
    """
    backend = _backend(attention)
    hidden, cache = hidden_of(model, params, cache, step, backend=backend, adapters=adapters)
    return cache, model.apply(
        {"params": params}, hidden[step.logit_index], backend, method="logits"
    )


@own_constants()
def prefill(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    sampling: SamplingInput | None = None,
    *,
    attention: str | Backend | Attention = "xla",
    adapters: Adapters | None = None,
    num_top: int = 0,
) -> tuple[KVCache, StepOutput]:
    """(the cache, what was drawn at `step.logit_index`); without `sampling`, greedily."""
    backend = _backend(attention)
    hidden, cache = hidden_of(model, params, cache, step, backend=backend, adapters=adapters)
    if sampling is None:
        sampling = greedy_sampling(step.logit_index.shape[0])
    read = read_hidden(hidden, step)
    return cache, draw(model, params, read, sampling, backend=backend, num_top=num_top)


decode = prefill
"""The same function: decode is the case of one token a row."""


@dataclass(frozen=True)
class _WithAttention(Xla):
    """XLA's operations, with an attention function of the caller's own."""

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


def _backend(attention: str | Backend | Attention) -> Backend:
    return _WithAttention(function=attention) if callable(attention) else as_backend(attention)
