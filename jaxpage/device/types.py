"""The device's messages: pytrees of arrays with a shape beside every field, and how to build them.

T tokens, B rows, M table width, R draws, J alternatives, C history width, P blocks in the pool
(null block 0 included), S block size, K KV heads, H head dim, V vocabulary, D hidden size.

    query_starts   0        3  4        7  7      B = 4 rows: 3 prefill tokens, 1 decode token,
    tokens         a  b  c  d  e  f  g  .         3 prefill tokens, an empty padding row; T = 8
    slots          live slots < P*S        P*S    padding tokens: distinct slots >= P*S (dropped)
    logit_index          2  3        6            R draws read the hidden state of these tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """One layer's part of the pool. Block 0 is the null block: never allocated."""

    k: Array  # [P, S, K, H] model dtype
    v: Array  # [P, S, K, H] model dtype
    scales: Array | None = None  # quantised pools only; None: stored as is


KVCache = tuple[LayerKV, ...]
"""One LayerKV a layer; donated on every call, never scanned over (updates stay in place)."""


@register_dataclass
@dataclass(frozen=True)
class StepInput:
    """What one forward pass needs to know, all int32. Decode is the case T == B.

    A row's queries are its last tokens: row b holds tokens query_starts[b]:query_starts[b+1],
    and their positions end at context_lens[b] - 1. Padding rows have context_lens 0.
    """

    tokens: Array  # [T]
    positions: Array  # [T] position in the sequence, 0-based; 0 for padding
    slots: Array  # [T] block_id * S + offset; distinct values >= P*S for padding
    block_tables: Array  # [B, M] block ids in logical order; 0 beyond the live part
    context_lens: Array  # [B] tokens in the cache once this step has written
    query_starts: Array  # [B + 1] non-decreasing; the last entry is the number of live tokens
    token_source: Array  # [B] 0: tokens as given; d+1: the row's last token is previous draw d
    prompt_lens: Array  # [B] tokens of the row's own prompt (dynamic rope scaling reads it)
    logit_index: Array  # [R] index into T of the token whose logits a draw reads; 0 for padding


@register_dataclass
@dataclass(frozen=True)
class DrawInput:
    """What a forward pass hands to the sampler, one entry a draw."""

    hidden: Array  # [R, D] final hidden state, normalised, model dtype
    token_ids: Array  # [R] int32, the token that was just fed (the last of the draw's history)
    positions: Array  # [R] int32, the position of the token that will be drawn


@register_dataclass
@dataclass(frozen=True)
class SamplingInput:
    """Settings of the draws, one row each; padding rows are greedy with everything off."""

    temperature: Array  # [R] float32, 0 = greedy
    top_k: Array  # [R] int32, 0 = off
    top_p: Array  # [R] float32, 1 = off
    min_p: Array  # [R] float32, 0 = off
    seed_words: Array  # [R, 2] uint32, high and low half of the 64-bit seed
    sample_index: Array  # [R] int32
    processed_logprobs: Array  # [R] bool, logprobs of the drawn-from distribution, not the raw one
    edits: LogitEdits | None = None  # None: no draw of this step edits its logits
    history: History | None = None  # None: no draw of this step looks at its history


@register_dataclass
@dataclass(frozen=True)
class LogitEdits:
    """Changes of single logits. Ids are padded with V (dropped), never -1."""

    bias_ids: Array  # [R, E] int32
    bias_values: Array  # [R, E] float32, -inf forbids
    allowed: Array  # [R, ceil(V / 32)] uint32 bit mask, bit i % 32 of word i // 32; all ones = all
    stop_ids: Array  # [R, Z] int32, forbidden while the drawn position < min_position
    min_position: Array  # [R] int32, prompt_len + min_tokens


@register_dataclass
@dataclass(frozen=True)
class History:
    """Tokens before each draw's last one, which arrives in DrawInput, still on the device."""

    tokens: Array  # [R, C] int32, padded with V
    lengths: Array  # [R] int32, live entries of `tokens`
    prompt_lens: Array  # [R] int32, tokens of the prompt; presence and frequency skip those
    presence: Array  # [R] float32, 0 = off
    frequency: Array  # [R] float32, 0 = off
    repetition: Array  # [R] float32, 1 = off
    bad_words: Array  # [R, W, L] int32, each word's ids right-aligned and padded left with V + 1
    bad_word_lens: Array  # [R, W] int32, 0 = no word


@register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What was drawn."""

    token_ids: Array  # [R] int32
    logprobs: Array  # [R] float32, in the draw's own mode
    raw_logprobs: Array  # [R] float32, log_softmax of the model's logits at the drawn token
    top_ids: Array  # [R, J] int32, best first, in the draw's own mode; J is 0 or MAX_LOGPROBS
    top_logprobs: Array  # [R, J] float32


def to_device(tree: object) -> object:
    """The one place where fresh NumPy arrays go to the device: one device_put for a whole tree."""
    return jax.device_put(tree)
