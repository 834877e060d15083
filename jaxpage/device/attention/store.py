"""What every form of attention begins with: K and V are stored, a mixed step is split in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jaxpage.config import AttentionSpec
from jaxpage.device.kv_cache import write_kv
from jaxpage.device.types import LayerKV, StepInput

Attend = Callable[[Array, LayerKV, StepInput, AttentionSpec], Array]
"""(q [T, N, H], layer_kv, step, spec) -> attention to what the pool holds [T, N, H]."""


def store_then_attend(
    q: Array,
    k: Array,
    v: Array,
    layer_kv: LayerKV,
    step: StepInput,
    *,
    attend: Attend,
    spec: AttentionSpec,
) -> tuple[Array, LayerKV]:
    """(attention of q [T, N, H], the layer with k and v [T, K, H] stored)."""
    layer_kv = write_kv(layer_kv, k, v, step.slots)
    out = [attend(q[part], layer_kv, own, spec) for part, own in split_mixed(step)]
    return jnp.concatenate(out) if len(out) > 1 else out[0], layer_kv


def split_mixed(step: StepInput) -> tuple[tuple[slice, StepInput], ...]:
    """A mixed step as its decode step and its prefill step, each with its tokens; others whole.

    So a form gets either rows of one token or packed rows, never both. The parts are for attention
    alone: fields that it doesn't read stay as they were.
    """
    count = step.num_single
    if not count or step.is_decode:
        return ((slice(None), step),)
    first, rest = slice(None, count), slice(count, None)
    starts = step.query_starts

    def cut(part: slice, query_starts: Array, num_single: int) -> tuple[slice, StepInput]:
        own = replace(
            step,
            tokens=step.tokens[part],
            positions=step.positions[part],
            slots=step.slots[part],
            block_tables=step.block_tables[part],
            context_lens=step.context_lens[part],
            query_starts=query_starts,
            token_source=step.token_source[part],
            prompt_lens=step.prompt_lens[part],
            num_single=num_single,
        )
        return part, own

    return cut(first, starts[: count + 1], count), cut(rest, starts[count:] - count, 0)
