"""Runs the device's sampler on the oracle's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.device.sampling.sample import sample
from jaxpage.device.sampling.settings import draw_history, logit_edits, sampling_input
from jaxpage.device.types import DrawInput, SamplingInput, StepOutput
from tests.device.sampling.oracle import Settings, column

run_sample = jax.jit(sample, static_argnames=("num_top", "num_token_ids"))


NUM_TOP = 20


def draw_input(token_ids: Sequence[int], positions: Sequence[int]) -> DrawInput:
    return DrawInput(
        hidden=jnp.zeros((len(token_ids), 1)),
        token_ids=jnp.asarray(token_ids, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
    )


def inputs(
    rows: Sequence[Settings], vocab_size: int, *, seeds: Sequence[int] | int = 0, **more: Any
) -> tuple[DrawInput, SamplingInput]:
    """The device's messages for these draws, edits and histories included."""
    count = len(rows)
    edits = logit_edits(
        count,
        vocab_size,
        bias=column(rows, "bias"),
        allowed=column(rows, "allowed"),
        stop_ids=column(rows, "stop_ids"),
        min_position=[row.prompt_len + row.min_tokens for row in rows],
    )
    history = draw_history(
        count,
        vocab_size,
        tokens=[row.tokens[:-1] for row in rows],
        prompt_lens=column(rows, "prompt_len"),
        presence=column(rows, "presence"),
        frequency=column(rows, "frequency"),
        repetition=column(rows, "repetition"),
        bad_words=column(rows, "bad_words"),
    )
    settings = sampling_input(
        count,
        seed=seeds,
        edits=_widened(edits, vocab_size, ("bias_ids", "bias_values", "stop_ids")),
        history=_widened(history, vocab_size, ("tokens", "bad_words", "bad_word_lens")),
        **{name: column(rows, name) for name in ("temperature", "top_k", "top_p", "min_p")},
        **more,
    )
    draw = draw_input([row.tokens[-1] for row in rows], [len(row.tokens) for row in rows])
    return draw, settings


def sample_rows(
    logits: np.ndarray,
    rows: Sequence[Settings],
    *,
    seeds: Sequence[int] | int = 0,
    num_token_ids: int | None = None,
    **more: Any,
) -> StepOutput:
    """One draw a row of logits [R, V], fetched; every call of one R and V is one program."""
    draw, settings = inputs(rows, logits.shape[1], seeds=seeds, **more)
    return jax.device_get(
        run_sample(
            jnp.asarray(logits), draw, settings, num_top=NUM_TOP, num_token_ids=num_token_ids
        )
    )


def sample_plain(logits: np.ndarray, *, position: int = 1, **settings: Any) -> StepOutput:
    """The same for draws that edit nothing and look at no history."""
    rows = len(logits)
    draw = draw_input([0] * rows, [position] * rows)
    return jax.device_get(run_sample(jnp.asarray(logits), draw, sampling_input(rows, **settings)))


def _widened(message: Any, vocab_size: int, names: tuple[str, ...], width: int = 16) -> Any:
    """The message with these [R, n] or [R, W, L] fields padded to one width."""
    wide = {}
    for name in names:
        array = getattr(message, name)
        padding = {"bias_values": 0, "bad_word_lens": 0, "bad_words": vocab_size + 1}
        value = padding.get(name, vocab_size)
        if name == "bad_words":  # right-aligned words
            spare = (4 - array.shape[1], 4 - array.shape[2])
            array = np.pad(array, ((0, 0), (0, spare[0]), (spare[1], 0)), constant_values=value)
        else:
            most = 4 if name == "bad_word_lens" else width
            array = np.pad(array, ((0, 0), (0, most - array.shape[1])), constant_values=value)
        wide[name] = array
    return replace(message, **wide)
