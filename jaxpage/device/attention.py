"""Attention over a paged KV pool: `make_attention` names the backends, each one function.

A backend knows queries, a layer's pool and the step; it refuses to know layers, rotary positions
and who owns a block. Every backend stores the step's K and V first and then attends, so a query
sees its own token. All agree with `reference`, the plain float32 oracle:

- a query at position p of a row sees that row's positions p - window + 1 .. p, nothing else;
- a row with context_lens 0, and every padding token, gets exactly 0;
- softmax and accumulators are float32, whatever the pool holds;
- stale slots may hold anything, NaN too: nothing outside the live tokens can leak.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jaxpage import native
from jaxpage.device.attention_native import attend_native, takes_native
from jaxpage.device.attention_pallas import attend_pallas
from jaxpage.device.attention_parts import EXACT, MASKED
from jaxpage.device.attention_xla import attend_xla
from jaxpage.device.kv_cache import write_kv
from jaxpage.device.types import Attention, LayerKV, StepInput
from jaxpage.errors import ConfigError
from jaxpage.terms import own_constants

if TYPE_CHECKING:
    from jaxtyping import Float


@cache  # one function object a setting, so that a traced layer is found again by its attention
def make_attention(
    name: str,
    *,
    scale: float,
    sliding_window: int | None = None,
    shares_prefixes: bool = True,
) -> Attention:
    """The backend `name` as `(q, k, v, layer_kv, step) -> (out, layer_kv)`.

    "reference" is differentiable and as plain as can be; "xla" runs to the live length only;
    "native" is CPU kernels, where they are built; "pallas" is GPU kernels, interpreted elsewhere.
    `shares_prefixes`: native reads what rows begin with in common once; the others are told by
    the step. Raises ConfigError for any other name.
    """
    backends = {
        "reference": attend_reference,
        "xla": attend_xla,
        "native": attend_xla,  # what the kernels do not read
        "pallas": attend_pallas,
    }
    if name not in backends:
        raise ConfigError(f"got attention={name!r}, wanted one of {sorted(backends)}")
    if name == "native" and not native.is_built():
        raise ConfigError(f"got attention='native', wanted 'xla' or 'reference': {native.MISSING}")
    attend = backends[name]
    sees = {"scale": scale, "sliding_window": sliding_window}

    @own_constants()
    def attention(
        q: Array, k: Array, v: Array, layer_kv: LayerKV, step: StepInput
    ) -> tuple[Array, LayerKV]:
        if name == "native" and takes_native(layer_kv):
            return attend_native(q, k, v, layer_kv, step, **sees, shares_prefixes=shares_prefixes)
        layer_kv = write_kv(layer_kv, k, v, step.slots)
        out = [attend(q[part], layer_kv, own, **sees) for part, own in split_mixed(step)]
        return jnp.concatenate(out) if len(out) > 1 else out[0], layer_kv

    return attention


def split_mixed(step: StepInput) -> tuple[tuple[slice, StepInput], ...]:
    """A mixed step as its decode step and its prefill step, each with its tokens; others whole.

    So a backend only ever meets T == B or packed rows. The parts are for attention alone: what it
    doesn't read stays as it was.
    """
    count = step.num_decode_rows
    if not count:
        return ((slice(None), step),)
    first, rest = slice(None, count), slice(count, None)
    starts = step.query_starts

    def cut(part: slice, query_starts: Array) -> tuple[slice, StepInput]:
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
            num_decode_rows=0,
        )
        return part, own

    return cut(first, starts[: count + 1]), cut(rest, starts[count:] - count)


@own_constants()
def attend_reference(
    q: Float[Array, "T N H"],
    layer_kv: LayerKV,
    step: StepInput,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "T N H"]:
    """Every token against every slot of every row's table, masked: slow, short, differentiable."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, width = step.block_tables.shape
    _, block_size, num_kv_heads, _ = layer_kv.k.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    starts_before = jnp.searchsorted(step.query_starts, token, side="right").astype(jnp.int32)
    row_of = starts_before - 1  # B for padding
    first_query = step.context_lens - jnp.diff(step.query_starts)

    # of a row's table, which is the position in the row
    slot = jnp.arange(width * block_size, dtype=jnp.int32)
    is_stored = slot[None] < step.context_lens[:, None]  # [B, slots]
    is_seen = slot[None] <= step.positions[:, None]  # [T, slots]
    if sliding_window is not None:
        is_stored &= slot[None] > first_query[:, None] - sliding_window
        is_seen &= slot[None] > step.positions[:, None] - sliding_window
    is_seen = is_seen[None] & is_stored[:, None]  # [B, T, slots]
    is_seen &= (row_of[None] == jnp.arange(num_rows, dtype=jnp.int32)[:, None])[..., None]

    def gather(pool: Array) -> Array:
        stored = pool[step.block_tables].reshape(num_rows, -1, num_kv_heads, head_dim)
        return jnp.where(is_stored[..., None, None], stored, 0).astype(jnp.float32)

    k, v = gather(layer_kv.k), gather(layer_kv.v)
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    mask = is_seen[:, None, None]
    scores = jnp.einsum("tkgh,bskh->bkgts", queries, k, precision=EXACT) * scale
    scores = jnp.where(mask, scores, MASKED)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.maximum(weights.sum(-1), jnp.finfo(jnp.float32).tiny)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=EXACT)
    out = out / jnp.moveaxis(total, 3, 1)[..., None]
    own = out[jnp.minimum(row_of, num_rows - 1), token]  # chosen, not summed: NaN stays in its row
    return own.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
