"""From logits to tokens: each draw with its own settings, independent of the other draws.

    logits -> stages: edits; bad words and penalties -> greedy: argmax
                                                     -> others: temperature, min-p, top-k, top-p,
                                                        one draw

Settings are arrays. Another program is compiled only for: edits None or not, history None or of one
of two widths, num_top 0 or not: at most 2 x 3 x 2 for each row count, and for beams num_top on two
wider rungs. Work that no draw asks for is not done.
When all ids of a draw are forbidden it takes id 0, with log-probability -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpage.device.sampling.logit_edits import edit_logits
from jaxpage.device.sampling.penalties import penalise
from jaxpage.device.sampling.per_row import each_row, replace_rows
from jaxpage.device.sampling.random_draw import draw_key, sample_categorical
from jaxpage.device.sampling.truncation import truncate
from jaxpage.device.types import DrawInput, SamplingInput, StepOutput
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MIN_TEMPERATURE = 1e-5
"""Below it a draw is greedy, as in vLLM: logits divided by so little leave only the largest."""
BLOCK_IDS = 256


Apply = Callable[[Array, Any, DrawInput], Array]
"""A stage of the sampler: logits [R, V] and its state, as packed for these draws, to logits."""
STAGES: tuple[Apply, ...] = (edit_logits, penalise)
"""In order; `SamplingInput.states` has one entry each, None where no draw asks for the stage."""
ArgmaxLogsumexp = Callable[[Array], tuple[Array, Array]]
"""Of logits [R, V]: (int32 [R] index of the first largest, float32 [R] log of the sum of exp)."""


class Drawn(NamedTuple):
    """The result of one draw, or of each of R draws, in the draw's own logprobs mode."""

    token_ids: Array  # int32
    logprobs: Array  # float32
    top_ids: Array  # [J] int32
    top_logprobs: Array  # [J] float32


@own_constants()
def argmax_logsumexp(logits: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """What every draw reads of all its logits, in plain XLA; see `ArgmaxLogsumexp`."""
    return _first_largest(logits), each_row(jax.nn.logsumexp, logits)


@own_constants()
def sample(
    logits: Float[Array, "R V"],
    draw: DrawInput,
    sampling: SamplingInput,
    *,
    num_top: int = 0,
    num_token_ids: int | None = None,
    stages: tuple[Apply, ...] = STAGES,
    argmax_logsumexp: ArgmaxLogsumexp = argmax_logsumexp,
) -> StepOutput:
    """One token of each row of float32 logits, with log-probabilities.

    `num_top` alternatives come back beside each (at most V). `num_token_ids`: the logits from
    there on belong to a padded vocabulary; they count for nothing. What can't be drawn has the
    log-probability -inf, also as an alternative; that is right, though it trips `jax_debug_infs`.
    """
    logits = logits[:, :num_token_ids]
    edited = logits
    for apply, state in zip(stages, sampling.states, strict=bool(sampling.states)):
        if state is not None:
            edited = apply(edited, state, draw)

    largest, normaliser = argmax_logsumexp(logits)
    if edited is not logits:
        largest, _ = argmax_logsumexp(edited)  # a kernel computes the sum too, unused
    top_logits, top_ids = lax.top_k(logits, min(num_top, logits.shape[1]))
    greedy = Drawn(
        token_ids=largest,
        logprobs=jnp.zeros_like(normaliser),
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser[:, None],
    )
    is_processed = sampling.processed_logprobs
    asked = (sampling.temperature >= MIN_TEMPERATURE) | is_processed
    settings = replace(sampling, states=())
    drawn = replace_rows(asked, _draw_row, greedy, edited, greedy, settings, draw.positions)
    chosen = jnp.take_along_axis(logits, drawn.token_ids[:, None], axis=1)[:, 0]
    raw_logprobs = chosen - normaliser
    return StepOutput(
        token_ids=drawn.token_ids,
        logprobs=jnp.where(is_processed, drawn.logprobs, raw_logprobs),
        raw_logprobs=raw_logprobs,
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
    )


def _first_largest(logits: Array) -> Array:
    """argmax of [R, V] in two levels: maxima of blocks are vectorised, a CPU's argmax is not."""
    blocks = _in_blocks(logits)
    block = jnp.argmax(blocks.max(-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK_IDS + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def _in_blocks(logits: Array) -> Array:
    """[..., V] as [..., blocks, BLOCK_IDS], padded with -inf."""
    unpadded = [(0, 0)] * (logits.ndim - 1)
    padded = jnp.pad(
        logits, [*unpadded, (0, -logits.shape[-1] % BLOCK_IDS)], constant_values=-jnp.inf
    )
    return padded.reshape(*logits.shape[:-1], -1, BLOCK_IDS)


def _draw_row(logits: Array, greedy: Drawn, sampling: SamplingInput, position: Array) -> Drawn:
    """One draw that is random or wants processed log-probabilities; `greedy` is its default."""
    is_greedy = sampling.temperature < MIN_TEMPERATURE
    best = jnp.max(logits)
    scaled = (logits - jnp.where(best == -jnp.inf, 0, best)) / jnp.where(
        is_greedy, 1, sampling.temperature
    )
    scores = truncate(
        _in_blocks(scaled),
        top_k=jnp.where(is_greedy, 0, sampling.top_k),
        top_p=jnp.where(is_greedy, 1, sampling.top_p),
        min_p=jnp.where(is_greedy, 0, sampling.min_p),
    )
    weights = jnp.exp(scores)
    total = weights.sum()
    is_hopeless = ~(total > 0)  # all forbidden, or NaN
    key = draw_key(sampling.seed_words, sampling.sample_index, position)
    token_id = sample_categorical(key, weights)
    token_id = jnp.where(is_greedy | is_hopeless, greedy.token_ids, token_id)
    logprobs = scores.reshape(-1)[: logits.size] - jnp.log(jnp.where(total == 0, 1, total))
    top_logprobs, top_ids = lax.top_k(logprobs, greedy.top_ids.size)
    is_processed = sampling.processed_logprobs
    return Drawn(
        token_ids=token_id,
        logprobs=logprobs[token_id],
        top_ids=jnp.where(is_processed, top_ids, greedy.top_ids),
        top_logprobs=jnp.where(is_processed, top_logprobs, greedy.top_logprobs),
    )
