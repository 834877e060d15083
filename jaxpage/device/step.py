"""The programs of one step, as pure functions: a forward pass, draws, prompt log-probabilities.

They are separate so that the sampler's variants add to the number of programs instead of
multiplying it. `jaxpage.functional` puts them together for callers without an engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.ops import Adapters, Backend, Model, Ops
from jaxpage.device.sampling.sample import STAGES, Apply, sample
from jaxpage.device.types import DrawInput, KVCache, SamplingInput, StepInput, StepOutput
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@own_constants()
def hidden_step(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    previous_token_ids: Int[Array, "R0"],
    *,
    backend: Backend,
    adapters: Adapters | None = None,
) -> tuple[KVCache, DrawInput, Float[Array, "T D"]]:
    """(the cache, what the sampler needs at `step.logit_index`, every token's hidden state).

    `previous_token_ids` are the draws of the step before, padded to one length for all steps:
    row b with token_source d + 1 is fed draw d, which the host may not have seen yet.
    """
    step = _with_previous_draws(step, previous_token_ids)
    hidden, cache = hidden_of(model, params, cache, step, backend=backend, adapters=adapters)
    return cache, read_hidden(hidden, step), hidden


def hidden_of(
    model: Model,
    params: Any,
    cache: KVCache,
    step: StepInput,
    *,
    backend: Backend,
    adapters: Adapters | None = None,
) -> tuple[Float[Array, "T D"], KVCache]:
    """(every token's hidden state, the cache with this step's K and V)."""
    ops = Ops.of(step, backend, adapters)
    return model.apply({"params": params}, step.tokens, step.positions, cache, ops)


def read_hidden(hidden: Float[Array, "T D"], step: StepInput) -> DrawInput:
    """What the sampler needs of the tokens at `step.logit_index`, which may be any of the step."""
    at = step.logit_index
    return DrawInput(hidden=hidden[at], token_ids=step.tokens[at], positions=step.positions[at] + 1)


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
    backend: Backend,
    stages: tuple[Apply, ...] = STAGES,
    num_top: int = 0,
    num_token_ids: int | None = None,
) -> StepOutput:
    """The next token of each draw; reads only those `params` that `model.head` names.

    `num_token_ids`: ids from there on are padding, never drawn.
    """
    logits = model.apply({"params": params}, draw_input.hidden, backend, method="logits")
    return sample(
        logits,
        draw_input,
        sampling,
        stages=stages,
        num_top=num_top,
        num_token_ids=num_token_ids,
        argmax_logsumexp=backend.argmax_logsumexp,
    )


@own_constants()
def pack_draws(output: StepOutput, size: int) -> Int[Array, "3 R0"]:
    """Rows of token ids, and of the bits of their log-probabilities and raw ones, padded to `size`.

    This small array is all that the host reads of most steps; its first row feeds the next step.
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
    backend: Backend,
    num_top: int,
    slice_rows: int = 64,
    num_token_ids: int | None = None,
) -> tuple[Float[Array, "T"], Int[Array, "T J"], Float[Array, "T J"]]:
    """Raw log-probability of target t after token t, and the most likely ids with theirs.

    Logits exist for `slice_rows` tokens at a time, never [T, V]. Entries whose target is padding
    (0) mean nothing.
    """
    num_tokens = targets.shape[0]
    extra = -num_tokens % slice_rows
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, slice_rows, hidden.shape[1])
    targets = jnp.pad(targets, (0, extra)).reshape(-1, slice_rows)

    def evaluate(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, targets = part
        logits = model.apply({"params": params}, hidden, backend, method="logits")[
            :, :num_token_ids
        ]
        logprobs = jax.nn.log_softmax(logits)
        best, ids = lax.top_k(logprobs, min(num_top, logprobs.shape[1]))
        return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0], ids, best

    logprobs, ids, best = lax.map(evaluate, (hidden, targets))
    return (
        logprobs.reshape(-1)[:num_tokens],
        ids.reshape(-1, ids.shape[-1])[:num_tokens],
        best.reshape(-1, best.shape[-1])[:num_tokens],
    )


def _with_previous_draws(step: StepInput, previous: Array) -> StepInput:
    """The step with each row's last token replaced by the draw that `token_source` names."""
    is_drawn = step.token_source > 0
    drawn = previous[jnp.maximum(step.token_source - 1, 0)]
    last = jnp.where(is_drawn, step.query_starts[1:] - 1, step.tokens.shape[0])
    return replace(step, tokens=step.tokens.at[last].set(drawn, mode="drop"))
