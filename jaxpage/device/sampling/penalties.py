"""What a draw's own history does to its logits: bad words and the three penalties.

The rules are vLLM's: repetition looks at prompt and output; presence, frequency and bad words at
the output alone. The newest token is not in the history: it is still on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jaxpage.device.sampling.per_row import replace_rows
from jaxpage.device.types import DrawInput, History

if TYPE_CHECKING:
    from jaxtyping import Float


def penalise(logits: Float[Array, "R V"], history: History, draw: DrawInput) -> Float[Array, "R V"]:
    """The logits after bad words and penalties; each draw's history ends with `draw.token_ids`."""
    asked = (
        (history.presence != 0)
        | (history.frequency != 0)
        | (history.repetition != 1)
        | (history.bad_word_lens > 0).any(-1)
    )
    return replace_rows(asked, _penalise_row, logits, logits, history, draw.token_ids)


def _penalise_row(row: Array, history: History, last_token: Array) -> Array:
    row = row.at[_ends_of_bad_words(row.size, history, last_token)].set(-jnp.inf, mode="drop")
    index = jnp.arange(history.tokens.size, dtype=jnp.int32)
    known = jnp.where(index < history.lengths, history.tokens, row.size)
    ids = jnp.append(known, last_token)
    is_output = jnp.append(index >= history.prompt_lens, history.lengths >= history.prompt_lens)
    is_seen = jnp.zeros(row.size, jnp.bool_).at[ids].set(True, mode="drop")
    output_ids = jnp.where(is_output, ids, row.size)
    counts = jnp.zeros(row.size, jnp.float32).at[output_ids].add(1, mode="drop")
    factor = jnp.where(row > 0, 1 / history.repetition, history.repetition)
    row = jnp.where(is_seen, row * factor, row)
    return row - history.frequency * counts - history.presence * (counts > 0).astype(jnp.float32)


def _ends_of_bad_words(nowhere: int, history: History, last_token: Array) -> Array:
    """[W] the last id of each word whose other ids end the output so far; `nowhere` for others.

    L = 4, output x d e: tail (x d e) matches word (. d e y) and forbids y.
    """
    _, longest = history.bad_words.shape
    back = jnp.arange(1 - longest, 0, dtype=jnp.int32)
    index = history.lengths + 1 + back  # of the last tokens, in the whole sequence
    tail = history.tokens[jnp.clip(index, 0, history.tokens.size - 1)]
    tail = jnp.where(index == history.lengths, last_token, tail)
    is_output = index >= history.prompt_lens
    place = jnp.arange(longest - 1, dtype=jnp.int32)
    is_prefix = place[None] >= longest - history.bad_word_lens[:, None]
    matches = (history.bad_words[:, :-1] == tail[None]) & is_output[None]
    is_ending = (matches | ~is_prefix).all(-1) & (history.bad_word_lens > 0)
    return jnp.where(is_ending, history.bad_words[:, -1], nowhere)
