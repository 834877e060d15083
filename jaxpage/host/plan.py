"""The messages between the host and the engine: what a step is to run, and what came back.

All are values that never change: token ids, positions and block ids, no arrays. Rows and updates,
of which a step has many, are named tuples: made in a third of a frozen dataclass's time.

    sequence, block_size 4        tokens  a b c d | e f g . |     blocks (5, 2)
    decode row of token g         token_ids (g,)  start 6  num_tokens 1  context_len 7
    prefill row of c d e          token_ids (c, d, e)  start 2  num_tokens 3  context_len 5
    slot of the token at 6        blocks[6 // 4] * 4 + 6 % 4 = 2 * 4 + 2 = 10
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpage.outputs import FinishReason, TokenLogprob
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

Namespace = tuple[tuple[str, str], ...]
"""(kind, value) pairs that keep prefixes apart, such as a salt or an adapter: equal tokens share
blocks only in equal namespaces."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """64 bits; chosen by the engine where params.seed is None."""
    arrival_s: float = 0.0
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """params.bad_words as token ids; carried to the request's draws."""
    priority: int = 0
    """Lower runs first."""
    namespace: Namespace = ()
    adapter: int = 0
    """Which of the model's adapters is used; 0 is none."""
    beam: BeamSearchParams | None = None
    """Beam search instead of sampling; `params` then holds the limits and the end ids."""

    @property
    def num_sequences(self) -> int:
        """Samples or beams: rows that it needs at once."""
        return self.params.num_sequences if self.beam is None else self.beam.beam_width

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends a sequence of it."""
        eos_token_ids = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos_token_ids.union(self.params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be sampled from a row's logits: n samples are n draws of one row.

    A beam's draw samples nothing: it asks for `num_candidates`, and the host chooses among them.
    """

    seq_id: int
    sample_index: int
    seed: int
    params: SamplingParams
    prompt_len: int
    """Tokens of the request's own prompt; the tokens after it are output."""
    stop_token_ids: tuple[int, ...]
    """Ids that may not be drawn before min_tokens: the request's own and the model's end ids, these
    also with ignore_eos, as in vLLM."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    history: tuple[int, ...] = ()
    """All known tokens before the row's last one, prompt first; () unless params.needs_history."""
    num_candidates: int = 0
    """Beam search: how many of the best ids, with raw log-probabilities, `StepResult.top` holds."""
    offset: int = -1
    """Place in its row of the token whose logits it reads, as Python counts: -1 is the last."""


class PlannedRow(NamedTuple):
    """One sequence's part of a step: `num_tokens` new tokens starting at position `start`."""

    seq_id: int
    token_ids: tuple[int, ...]
    """The new tokens; empty when the one new token is draw `source` of the previous step."""
    source: int | None
    """Index of a draw of the previous plan, or None: the tokens are the host's."""
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    """The sequence's whole block table; the same tuple object until the table changes."""
    prompt_len: int
    draws: tuple[Draw, ...]
    """Empty: no logits are wanted of this row."""
    prompt_targets: tuple[int, ...] = ()
    """Entry j is the prompt token that follows the row's token `target_offset + j` and whose
    log-probability is wanted."""
    target_offset: int = 0
    num_prompt_logprobs: int = 0
    """Alternatives wanted beside each prompt target."""
    adapter: int = 0
    """As in its request."""

    @property
    def context_len(self) -> int:
        """Tokens in the cache once this row has run."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Block copies before a step, in this order; each group reads all before it writes any."""

    swap_out: tuple[tuple[int, int], ...] = ()
    """(device block, host block)"""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, device block)"""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination), both on the device"""

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the device; kept until its result has been read."""

    step_id: int
    rows: tuple[PlannedRow, ...]
    num_single: int
    """Rows before this one have one token and no prompt targets; a decode step has no others."""
    moves: BlockMoves = field(default_factory=BlockMoves)
    """Done before the rows run."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """All draws in row order: the order of a StepResult."""
        return tuple(draw for row in self.rows for draw in row.draws)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found: one entry a draw of its plan, in the order of `StepPlan.draws`."""

    step_id: int
    token_ids: Seq[int]
    logprobs: Seq[float]
    """Of the tokens, in the draw's own logprobs_mode."""
    raw_logprobs: Seq[float]
    top: Seq[tuple[tuple[int, float], ...]]
    """Ids and log-probabilities, best first, as many as params.logprobs or num_candidates."""
    prompt_logprobs: Seq[Seq[TokenLogprob]] = ()
    """One entry a row of the plan, in the order of its targets; () where no row has any."""


class SequenceUpdate(NamedTuple):
    """News of one sequence for the engine."""

    request_id: str
    seq_id: int
    sample_index: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a new token."""
    raw_logprob_sum: float = 0.0
    """Sum over the new tokens."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Why the request failed; the scheduler has removed it."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """The whole prompt's, told once, with the first update after they are complete."""
    num_preemptions: int = 0
    """Times its request has been preempted so far."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first admitted."""
    score: float | None = None
    """Beam search only: a finished hypothesis comes whole, in one update, `sample_index` its place
    in the order of scores."""


class Resumed(NamedTuple):
    """A request that goes on after a restart: what has been told of it."""

    request: Request
    outputs: tuple[tuple[int, ...], ...]
    """The tokens of each sequence; a beam search tells none before its end, and begins anew."""
    is_finished: tuple[bool, ...]
    """Of each sequence."""
    has_prompt_logprobs: bool
    """Whether the log-probabilities of its prompt have been told."""
