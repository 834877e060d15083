"""The functional core: one forward pass and one draw, as pure functions of pytrees.

The caller chooses jit, grad, donation and sharding; the engine's own programs are in
`jaxpage.device.step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

from jaxpage.backends import PLAIN, as_backend
from jaxpage.backends.own_attention import Attention, OwnAttention
from jaxpage.device.ops import Adapters, Backend, Model
from jaxpage.device.sampling.settings import greedy_sampling
from jaxpage.device.step import draw, hidden_of, read_hidden
from jaxpage.device.types import KVCache, SamplingInput, StepInput, StepOutput
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float


@own_constants()
def forward(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    *,
    attention: str | Backend | Attention = PLAIN,
    adapters: Adapters | None = None,
) -> tuple[KVCache, Float[Array, "R V"]]:
    """(the cache with this step's K and V, float32 logits [R, V] at `step.logit_index`).

    `attention` is a backend, by name or itself (`jaxpage.backends` says which there are, and which
    makes the pass differentiable in `params`), or a function that takes the place of the plain
    one's attention. `adapters`: what `step.adapters` counts.
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
    attention: str | Backend | Attention = PLAIN,
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


def _backend(attention: str | Backend | Attention) -> Backend:
    if callable(attention) and not isinstance(attention, type):
        return OwnAttention(function=attention)
    return as_backend(attention)
