"""The device's messages: pytrees of arrays with a shape beside every field, and how to build them.

T tokens, B rows, M table width, R draws, J alternatives, C history width, P blocks in the pool
(null block 0 included), S block size, N query heads, K KV heads, H head dim, V vocabulary, D hidden
size. Constructors: inputs.py builds a StepInput, sampling/settings.py a SamplingInput.

    query_starts   0        3  4        7  7      B = 4 rows: 3 prefill tokens, 1 decode token,
    tokens         a  b  c  d  e  f  g  .         3 prefill tokens, an empty padding row; T = 8
    slots          live slots < P*S        P*S    padding tokens: distinct slots >= P*S (dropped)
    logit_index          2  3        6            R draws read the hidden state of these tokens

A mixed step, num_single 4, of which 3 are live, and one prefill row of 2 tokens:

    tokens         a  b  c  .  d  e  .            T = 7, B = 5
    query_starts   0  1  2  3  4  6               row 3 is padding: one token, context_lens 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from jaxpage.weights import Leaf


@register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """One layer's part of the pool. Block 0 is the null block: never allocated."""

    k: Leaf  # [P, S, K, H] model dtype
    v: Leaf  # [P, S, K, H] model dtype
    scales: Leaf | None = None  # quantised pools only; None: stored as is


KVCache = tuple[LayerKV, ...]
"""One LayerKV a layer; donated on every call, never scanned over (updates stay in place)."""


@register_dataclass
@dataclass(frozen=True)
class StepInput:
    """What one forward pass needs to know, all int32.

    A row's queries are its last tokens: row b holds tokens query_starts[b]:query_starts[b+1],
    and their positions end at context_lens[b] - 1. Padding rows have context_lens 0.
    The first `num_single` rows have one token each: token b is row b's, padding rows too. The rows
    after them are packed, of any length. So num_single is B in a decode step, 0 in a prefill step,
    and between in a mixed one.
    `group_rows` changes no result: those rows have the same leading blocks, which may be read once.
    """

    tokens: Leaf  # [T]
    positions: Leaf  # [T] position in the sequence, 0-based; 0 for padding
    slots: Leaf  # [T] block_id * S + offset; distinct values >= P*S for padding
    block_tables: Leaf  # [B, M] block ids in logical order; 0 beyond the live part
    context_lens: Leaf  # [B] tokens in the cache once this step has written
    query_starts: Leaf  # [B + 1] non-decreasing; the last entry is the number of live tokens
    token_source: Leaf  # [B] 0: tokens as given; d+1: the row's last token is previous draw d
    prompt_lens: Leaf  # [B] tokens of the row's own prompt (dynamic rope scaling reads it)
    logit_index: Leaf  # [R] index into T of the token whose logits a draw reads; 0 for padding
    group_rows: Leaf = None  # [G, B] the rows of each group of a decode step, then B; None: none
    prefix_lens: Leaf = None  # [G] tokens, whole blocks, that a group shares; 0 for padding
    adapters: Leaf = None  # [B] the adapter of each row, 0: none; None: no row has any
    num_single: int = field(default=0, kw_only=True, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        return self.block_tables.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every row has one token."""
        return self.num_single == self.num_rows

    def row_of_tokens(self) -> Array:
        """The row of each token, B for padding: [T] int32."""
        token = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        rows_before = jnp.searchsorted(self.query_starts, token, side="right")
        return rows_before.astype(jnp.int32) - 1


@register_dataclass
@dataclass(frozen=True)
class DrawInput:
    """What a forward pass hands to the sampler, one entry a draw."""

    hidden: Leaf  # [R, D] final hidden state, normalised, model dtype
    token_ids: Leaf  # [R] int32, the token that was just fed (the last of the draw's history)
    positions: Leaf  # [R] int32, the position of the token that will be drawn


@register_dataclass
@dataclass(frozen=True)
class SamplingInput:
    """Settings of the draws, one row each; padding rows are greedy with everything off.

    Settings are arrays, so no value compiles a new program: only which states are None, and the
    shapes of the others, do.
    """

    temperature: Leaf  # [R] float32; under MIN_TEMPERATURE, 0 too, is greedy
    top_k: Leaf  # [R] int32, 0 = off; padding 0
    top_p: Leaf  # [R] float32, 1 = off; padding 1
    min_p: Leaf  # [R] float32, 0 = off; padding 0
    seed_words: Leaf  # [R, 2] uint32, high and low half of the 64-bit seed; padding 0
    sample_index: Leaf  # [R] int32; padding 0
    processed_logprobs: Leaf  # [R] bool: logprobs of the distribution drawn from, not the raw one
    states: tuple[Any, ...] = ()  # one a stage of the sampler, [R, ...]; None: no draw asks for it


@register_dataclass
@dataclass(frozen=True)
class LogitEdits:
    """Changes of single logits. Ids are padded with V (dropped), never -1.

    A draw that edits nothing: ids V, bias 0, every bit of `allowed` set, min_position 0.
    """

    bias_ids: Leaf  # [R, E] int32, no id twice in a row; padding V
    bias_values: Leaf  # [R, E] float32, added; -inf forbids; padding 0
    allowed: Leaf  # [R, ceil(V / 32)] uint32, bit i % 32 of word i // 32; all ones = all
    stop_ids: Leaf  # [R, Z] int32, forbidden while the drawn position < min_position; padding V
    min_position: Leaf  # [R] int32, prompt_len + min_tokens; 0 = off


@register_dataclass
@dataclass(frozen=True)
class History:
    """Tokens before each draw's last one, which arrives in DrawInput, still on the device.

    A draw that looks at nothing: lengths 0, presence and frequency 0, repetition 1, no words.

        sequence a b c | d e   (prompt 3), drawing the token after e, bad word "d e x":
        tokens a b c d   lengths 4   prompt_lens 3   DrawInput.token_ids e
        bad_words (V+1) d e x at L = 4   bad_word_lens 3
    """

    tokens: Leaf  # [R, C] int32, the first `lengths` are live; padding V
    lengths: Leaf  # [R] int32, live entries of `tokens`, 0 .. C
    prompt_lens: Leaf  # [R] int32, tokens of the prompt; presence and frequency skip those
    presence: Leaf  # [R] float32, 0 = off
    frequency: Leaf  # [R] float32, 0 = off
    repetition: Leaf  # [R] float32, 1 = off
    bad_words: Leaf  # [R, W, L] int32, each word's ids right-aligned and padded left with V + 1
    bad_word_lens: Leaf  # [R, W] int32, 0 = no word


@register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What was drawn."""

    token_ids: Leaf  # [R] int32
    logprobs: Leaf  # [R] float32, in the draw's own mode
    raw_logprobs: Leaf  # [R] float32, log_softmax of the model's logits at the drawn token
    top_ids: Leaf  # [R, J] int32, best first, in the draw's own mode; J is num_top, at most V
    top_logprobs: Leaf  # [R, J] float32


@dataclass(frozen=True, slots=True)
class StepShape:
    """The axis lengths of a StepInput: what a forward program is compiled for."""

    num_tokens: int  # T
    num_rows: int  # B
    table_width: int  # M
    num_draws: int  # R
    num_single: int  # leading rows of one token
    num_groups: int = 0  # G
    has_adapters: bool = False

    @property
    def is_decode(self) -> bool:
        return self.num_single == self.num_rows

    @property
    def packed_size(self) -> int:
        """Length of the vector that `pack` makes."""
        return sum(math.prod(shape) for shape in self.fields().values())

    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of StepInput, in the order they are packed in."""
        tokens, rows, width = self.num_tokens, self.num_rows, self.table_width
        groups = {"group_rows": (self.num_groups, rows), "prefix_lens": (self.num_groups,)}
        return {
            "tokens": (tokens,),
            "positions": (tokens,),
            "slots": (tokens,),
            "block_tables": (rows, width),
            "context_lens": (rows,),
            "query_starts": (rows + 1,),
            "token_source": (rows,),
            "prompt_lens": (rows,),
            "logit_index": (self.num_draws,),
            **(groups if self.num_groups else {}),
            **({"adapters": (rows,)} if self.has_adapters else {}),
        }

    @classmethod
    def of(cls, step: StepInput) -> StepShape:
        rows, width = step.block_tables.shape
        return cls(
            num_tokens=step.tokens.shape[0],
            num_rows=rows,
            table_width=width,
            num_draws=step.logit_index.shape[0],
            num_single=step.num_single,
            num_groups=0 if step.prefix_lens is None else step.prefix_lens.shape[0],
            has_adapters=step.adapters is not None,
        )


def pack(step: StepInput) -> np.ndarray:
    """A NumPy StepInput as one fresh int32 vector: one transfer instead of one a field."""
    names = StepShape.of(step).fields()
    return np.concatenate([np.ravel(getattr(step, name)) for name in names], dtype=np.int32)


def unpack(vector: Array | np.ndarray, shape: StepShape) -> StepInput:
    """The StepInput that was packed, inside a jit; from a NumPy vector, views into that vector."""
    assert vector.shape == (shape.packed_size,), (vector.shape, shape)
    parts: dict[str, Any] = {}
    start = 0
    for name, size in shape.fields().items():
        end = start + math.prod(size)
        parts[name] = vector[start:end].reshape(size)
        start = end
    return StepInput(**parts, num_single=shape.num_single)
