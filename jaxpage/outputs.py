"""What a caller gets back: snapshots that never change, and what the engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class TokenLogprob(NamedTuple):
    """A token, its natural-log probability, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion so far. `token_ids` holds the end token, `text` does not."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    """Sum of raw log-probabilities of `token_ids`."""
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for an end-of-text id or a limit."""
    score: float | None = None
    """Beam search only: summed log-probability over length ** length_penalty."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock."""

    arrival_s: float
    first_token_s: float | None
    finish_s: float | None
    preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request so far. `error` is set, and `outputs` empty, when the request failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry a prompt token; the first is None."""
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None

    @classmethod
    def refused(cls, request_id: str, prompt: object, error: str) -> RequestOutput:
        """The output of a request that never ran; `prompt` is kept if it is text."""
        return cls(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=(),
            outputs=(),
            finished=True,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of one completion; a request's updates, added up, are its RequestOutput.

    A request whose completions are chosen when all have ended (best_of, beams) has no update
    before that.
    """

    request_id: str
    index: int
    """The completion's place among the request's outputs."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, where the request asked for them."""
    cumulative_logprob: float = 0.0
    """Sum of raw log-probabilities of the completion so far."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    """As in CompletionOutput."""
    finished: bool = False
    """Whether the request has finished: this is its last update."""
    error: str | None = None
    """Why the request failed; its earlier updates are then void."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started; times in seconds."""

    num_steps: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    blocks_total: int
    blocks_free: int
    peak_blocks_used: int
    mean_running: float
    slot_utilisation: float
    """Token slots in use over slots of allocated blocks, mean over steps."""
    blocks_saved_by_sharing: int
    preemptions_recompute: int
    preemptions_swap: int
    swapped_out_blocks: int
    prefix_hit_tokens: int
    num_compilations: int
    host_seconds: float
    device_wait_seconds: float

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(slots=True)
class Counters:
    """What the scheduler counts as it goes, since the start: the host's part of EngineStats."""

    num_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the requests that began to run, counted once even if recomputed."""
    generated_tokens: int = 0
    """Tokens handed to the engine; those drawn past an end are not."""
    preemptions_recompute: int = 0
    """Preemptions in which the request's blocks were freed."""
    preemptions_swap: int = 0
    """Preemptions in which the request's blocks went to the host."""
    swapped_out_blocks: int = 0
    """Blocks moved to the host; a shared block counts once a move."""
    prefix_hit_tokens: int = 0
    """Cached tokens of prompts at their first run; those of a preempted request don't count."""
    running_sum: int = 0
    """Sum over steps of the number of running sequences."""
    utilisation_sum: float = 0.0
    """Sum over steps of token slots in use over slots of allocated blocks."""

    @property
    def mean_running(self) -> float:
        return self.running_sum / max(self.num_steps, 1)

    @property
    def slot_utilisation(self) -> float:
        return self.utilisation_sum / max(self.num_steps, 1)


BlockKind = Literal["free", "cached", "owned", "held"]


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """One block of the KV pool at one moment.

    free     holds nothing
    cached   in no table: full, kept for a prefix hit, free when room is needed
    owned    in the tables of `seq_ids`; where these are several, they share it
    held     in no table, but a step or a copy that touches it is in flight
    """

    kind: BlockKind
    seq_ids: tuple[int, ...] = ()
    num_filled: int = 0
    """Slots that hold a token; 0 for held blocks: their content is not needed any more."""
    is_cached: bool = False
    """A prefix hit would find it; always true of kind "cached"."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The whole pool at one moment: `blocks[i]` is block i + 1. The null block is left out."""

    block_size: int
    blocks: tuple[MappedBlock, ...]
    request_of: Mapping[int, str] = field(default_factory=dict)
    """Sequence id -> request id, of the sequences that have not ended."""
