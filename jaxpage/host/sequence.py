"""The host's own record of what is being completed. Mutable: only the scheduler changes it.

Knows token ids and counts, no blocks. A sequence at depth 1, two prompt tokens, as it moves:

                        token_ids   num_in_flight   num_tokens   num_computed
    admitted            (a b)       0               2            0
    prefill planned     (a b)       1               3            2
    decode planned      (a b)       2               4            3     feeds the first draw
    prefill's draw read (a b c)     1               4            3     feeds the second draw next
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from jaxpage.host.plan import Draw, Request
from jaxpage.outputs import TokenLogprob


class Status(Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = auto()
    """Holds no blocks: new, or preempted."""
    RUNNING = auto()
    LEAVING = auto()
    """Its last step is planned and not read yet; holds no row and no block any more."""
    ENDED = auto()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and the sequences that complete it: one, until sampling draws several."""

    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """What has been read so far, None first; None itself when not asked for, or handed out."""
    num_targets: int = 1
    """Prompt tokens that need no further asking: the first, and those whose log-probability
    is read or in flight. Preemption leaves it as it is, so nothing is asked twice."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion under way."""

    seq_id: int
    group: SequenceGroup
    token_ids: list[int]
    """What the host knows: the prompt, then output that has been read."""
    prompt_len: int
    sample_index: int
    max_len: int
    """Tokens, prompt included, at which it ends by length."""
    draw: Draw
    """What is asked of every step that samples; its history is filled in where needed."""
    status: Status = Status.WAITING
    num_computed: int = 0
    """Tokens whose KV write has been dispatched."""
    num_in_flight: int = 0
    """Sampled tokens that have not been read."""
    prefill_len: int = 0
    """Tokens to feed before decoding, as of the last admission."""
    last_step: int = 0
    """The last plan that holds a row of it; 0 before the first."""
    draw_index: int = 0
    """Its draw's place in that plan; means nothing while num_in_flight is 0."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output(self) -> int:
        """Sampled tokens that have been read."""
        return len(self.token_ids) - self.prompt_len

    @property
    def is_score_only(self) -> bool:
        """Nothing is drawn: the prompt is scored, and that is all."""
        return self.max_len == self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    @property
    def num_to_prefill(self) -> int:
        """Tokens to feed when admitted now. The last token of a prompt predicts output only."""
        return len(self.token_ids) - self.is_score_only

    @property
    def is_last_step_planned(self) -> bool:
        """Certain to end by length once what is in flight has been read."""
        if self.is_score_only:
            return self.num_computed == self.prompt_len - 1
        return self.num_tokens >= self.max_len


def new_sequence(request: Request, seq_id: int, max_len: int) -> Sequence:
    """A sequence that has yet to run, in a group of its own."""
    params = request.params
    eos_token_ids = frozenset() if params.ignore_eos else request.eos_token_ids
    scores: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
    group = SequenceGroup(request=request, prompt_logprobs=scores)
    prompt_len, sample_index = len(request.prompt_token_ids), 0
    draw = Draw(
        seq_id=seq_id,
        sample_index=sample_index,
        seed=request.seed,
        params=params,
        prompt_len=prompt_len,
        stop_token_ids=tuple(sorted(eos_token_ids.union(params.stop_token_ids))),
        bad_word_ids=request.bad_word_ids,
    )
    sequence = Sequence(
        seq_id=seq_id,
        group=group,
        token_ids=list(request.prompt_token_ids),
        prompt_len=prompt_len,
        sample_index=sample_index,
        max_len=max_len,
        draw=draw,
    )
    group.sequences.append(sequence)
    return sequence
