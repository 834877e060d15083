"""One forward pass and one draw, as pure functions: the caller chooses jit, grad and donation.

`forward`, `prefill` and `decode` are what a researcher calls; `hidden_step`, `draw` and
`prompt_logprobs` are the same in two programs, so that the sampler's variants add to the number
of programs instead of multiplying it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.attention import make_attention
from jaxpage.device.sampling import Summarise, sample, summarise
from jaxpage.device.settings import greedy_sampling
from jaxpage.device.types import (
    Attention,
    DrawInput,
    KVCache,
    Model,
    SamplingInput,
    StepInput,
    StepOutput,
)
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@own_constants()
def forward(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    *,
    attention: str | Attention = "xla",
) -> tuple[KVCache, Float[Array, "R V"]]:
    """(the cache with this step's K and V, float32 logits at `step.logit_index`).

    attention="reference" makes it differentiable in `params`.
    """
    cache, hidden = _run(model, params, cache, step, attention)
    return cache, model.apply({"params": params}, hidden[step.logit_index], method="logits")


@own_constants()
def prefill(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    sampling: SamplingInput | None = None,
    *,
    attention: str | Attention = "xla",
    num_top: int = 0,
) -> tuple[KVCache, StepOutput]:
    """(the cache, what was drawn at `step.logit_index`); without `sampling`, greedily."""
    cache, hidden = _run(model, params, cache, step, attention)
    draw_input = _draw_input(hidden, step)
    if sampling is None:
        sampling = greedy_sampling(step.logit_index.shape[0])
    return cache, draw(model, params, draw_input, sampling, num_top=num_top)


decode = prefill
"""The same function: decode is the case of one token a row (T == B)."""


@own_constants()
def hidden_step(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    previous_token_ids: Int[Array, "R0"],
    *,
    attention: str | Attention = "xla",
) -> tuple[KVCache, DrawInput, Float[Array, "T D"]]:
    """(the cache, what the sampler needs, every token's hidden state).

    `previous_token_ids` are the draws of the step before, padded to one length for all steps:
    row b with token_source d + 1 is fed draw d, which the host may not have seen yet.
    """
    step = _with_previous_draws(step, previous_token_ids)
    cache, hidden = _run(model, params, cache, step, attention)
    return cache, _draw_input(hidden, step), hidden


@own_constants()
def spread_draws(draw_input: DrawInput, index: Int[Array, "R"]) -> DrawInput:
    """Entry `index[r]` for draw r: n samples of one prompt draw from the same hidden state."""
    return jax.tree.map(lambda leaf: leaf[index], draw_input)


@own_constants()
def draw(
    model: Model,
    params: Any,
    draw_input: DrawInput,
    sampling: SamplingInput,
    *,
    num_top: int = 0,
    num_token_ids: int | None = None,
    summarise: Summarise = summarise,
) -> StepOutput:
    """The next token of each draw. `num_token_ids`: ids from there on are padding, never drawn."""
    logits = model.apply({"params": params}, draw_input.hidden, method="logits")
    return sample(
        logits,
        draw_input,
        sampling,
        num_top=num_top,
        num_token_ids=num_token_ids,
        summarise=summarise,
    )


@own_constants()
def pack_draws(output: StepOutput, size: int) -> Int[Array, "3 R0"]:
    """Token ids, and as bits their log-probabilities and raw ones, padded to one length.

    A small array for all that the host reads of most steps; the next one is fed its first row.
    """
    logprobs = (output.logprobs, output.raw_logprobs)
    bits = (lax.bitcast_convert_type(values, jnp.int32) for values in logprobs)
    rows = jnp.stack([output.token_ids, *bits])
    return jnp.pad(rows, ((0, 0), (0, size - rows.shape[1])))


@own_constants()
def prompt_logprobs(
    model: Model,
    params: Any,
    hidden: Float[Array, "T D"],
    targets: Int[Array, "T"],
    *,
    num_top: int,
    slice_rows: int = 64,
    num_token_ids: int | None = None,
) -> tuple[Float[Array, "T"], Int[Array, "T J"], Float[Array, "T J"]]:
    """Raw log-probability of target t after token t, and the best ids with theirs.

    Logits exist for `slice_rows` tokens at a time, never [T, V]. Entries whose target is padding
    (0) mean nothing.
    """
    num_tokens = targets.shape[0]
    extra = -num_tokens % slice_rows
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, slice_rows, hidden.shape[1])
    targets = jnp.pad(targets, (0, extra)).reshape(-1, slice_rows)

    def score(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, targets = part
        logits = model.apply({"params": params}, hidden, method="logits")[:, :num_token_ids]
        logprobs = jax.nn.log_softmax(logits)
        best, ids = lax.top_k(logprobs, min(num_top, logprobs.shape[1]))
        return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0], ids, best

    logprobs, ids, best = lax.map(score, (hidden, targets))
    return (
        logprobs.reshape(-1)[:num_tokens],
        ids.reshape(-1, ids.shape[-1])[:num_tokens],
        best.reshape(-1, best.shape[-1])[:num_tokens],
    )


def _run(
    model: Model, params: Any, cache: KVCache, step: StepInput, attention: str | Attention
) -> tuple[KVCache, Array]:
    if isinstance(attention, str):
        config = model.config
        attention = make_attention(
            attention, scale=config.head_dim**-0.5, sliding_window=config.sliding_window
        )
    hidden, cache = model.apply({"params": params}, cache, step, attention)
    return cache, hidden


def _draw_input(hidden: Array, step: StepInput) -> DrawInput:
    at = step.logit_index
    return DrawInput(hidden=hidden[at], token_ids=step.tokens[at], positions=step.positions[at] + 1)


def _with_previous_draws(step: StepInput, previous: Array) -> StepInput:
    """The step with each row's last token replaced by the draw that `token_source` names."""
    is_drawn = step.token_source > 0
    drawn = previous[jnp.maximum(step.token_source - 1, 0)]
    last = jnp.where(is_drawn, step.query_starts[1:] - 1, step.tokens.shape[0])
    return replace(step, tokens=step.tokens.at[last].set(drawn, mode="drop"))
