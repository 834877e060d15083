"""The host's own record of what is being completed. Mutable: only the scheduler changes it.

Knows token ids and counts, no blocks. A sequence at depth 1, two prompt tokens, as it moves:

                        token_ids   num_in_flight   num_tokens   num_computed
    admitted            (a b)       0               2            0
    prefill planned     (a b)       1               3            2
    decode planned      (a b)       2               4            3     feeds the first draw
    prefill's draw read (a b c)     1               4            3     feeds the second draw next

A group of samples or beams begins as one row of its first sequence; the others hold nothing until
that row has drawn. Preempted later, each is prefilled again from where it leaves its leader.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from jaxpage.host.beam import BeamSearch, num_candidates
from jaxpage.host.plan import Draw, Request, Resumed
from jaxpage.outputs import TokenLogprob

Candidates = tuple[tuple[int, float], ...]
"""The best ids after a beam with their raw log-probabilities, best first."""


class Status(Enum):
    """Where a sequence stands; its group may be running while it still waits."""

    WAITING = auto()
    """Holds no blocks: new, preempted, or about to follow its leader."""
    SWAPPED = auto()
    """Its blocks are on the host."""
    RUNNING = auto()
    LEAVING = auto()
    """Its last step is planned and not read yet; holds no row and no block any more."""
    ENDED = auto()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and the sequences that complete it: samples, beams, or just one."""

    request: Request
    arrival: int
    """Grows with each request."""
    sequences: list[Sequence] = field(default_factory=list)
    live: list[Sequence] = field(default_factory=list)
    """Those that have not ended; of beams those in use, best first."""
    beams: BeamSearch | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """What has been read so far, None first; None itself when not asked for, or handed out."""
    num_targets: int = 1
    """Prompt tokens that need no further asking: the first, and those whose log-probability
    is read or in flight. Preemption leaves it as it is, so nothing is asked twice."""
    is_one_row: bool = True
    """Nothing has been drawn: the first sequence's row stands for all."""
    is_queued: bool = False
    is_running: bool = False
    last_step: int = 0
    """The last plan that holds a row of it; 0 before the first."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first ran; None before."""
    returned_for: int = 0
    """The plan that last brought it back from the host; 0 for none."""
    retry_free_blocks: int = 0
    """Free blocks at which to look at it again, as of the last time it did not fit."""

    @property
    def lead(self) -> Sequence:
        return self.live[0]

    @property
    def num_seats(self) -> int:
        """Rows that it may need at once."""
        if len(self.live) == 1 and self.beams is None:
            return int(self.live[0].status is not Status.LEAVING)
        staying = sum(sequence.status is not Status.LEAVING for sequence in self.live)
        return len(self.sequences) if staying and self.beams is not None else staying

    @property
    def is_ready(self) -> bool:
        """Beams only: all have been fed and none awaits a choice, so they can step together."""
        return all(
            sequence.status is Status.RUNNING
            and not sequence.is_prefilling
            and not sequence.num_in_flight
            and sequence.candidates is None
            for sequence in self.live
        )


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
    own_draws: tuple[Draw, ...] | None = None
    """The draw alone, where every step asks the same; None where its history changes."""
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
    leader: Sequence | None = None
    """Whose leading blocks it takes over once they are computed; None: it begins by itself."""
    num_led_blocks: int = 0
    candidates: Candidates | None = None
    """A beam's, read and not yet chosen from."""
    shared: SharedPrefix | None = None
    """How far its table agreed with another's when that was last looked at."""

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
        if self.max_len == self.prompt_len:
            return self.num_computed == self.prompt_len - 1
        return len(self.token_ids) + self.num_in_flight >= self.max_len


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Two tables, told apart by identity, and how many of their leading blocks are the same."""

    table: tuple[int, ...]
    other: tuple[int, ...]
    num_blocks: int


def new_group(request: Request, first_seq_id: int, max_len: int) -> SequenceGroup:
    """A request's sequences that have yet to run, with ids from `first_seq_id` on."""
    params, beam = request.params, request.beam
    scores: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
    group = SequenceGroup(request=request, arrival=first_seq_id, prompt_logprobs=scores)
    draw = _new_draw(request, first_seq_id)
    if beam is not None:
        end_ids = _end_ids(request)
        draw = replace(draw, num_candidates=num_candidates(beam, end_ids))
        max_output = max_len - len(request.prompt_token_ids)
        group.beams = BeamSearch(beam, end_ids=end_ids, max_output=max_output)
    for index in range(num_sequences(request)):
        own = replace(draw, seq_id=first_seq_id + index, sample_index=index)
        sequence = Sequence(
            seq_id=first_seq_id + index,
            group=group,
            token_ids=list(request.prompt_token_ids),
            prompt_len=len(request.prompt_token_ids),
            sample_index=index,
            max_len=max_len,
            draw=own,
            own_draws=None if params.needs_history else (own,),
        )
        group.sequences.append(sequence)
    group.live = group.sequences[:1] if group.beams else list(group.sequences)
    return group


def resumed_group(known: SequenceGroup, told: Resumed) -> SequenceGroup:
    """The group with what has been told of it and nothing else, as if it had given way.

    Of what `known` holds only what never changes and what has been counted is looked at.
    """
    group = new_group(known.request, known.arrival, known.sequences[0].max_len)
    group.num_preemptions = known.num_preemptions
    group.num_cached_tokens = known.num_cached_tokens
    if told.has_scores:
        group.prompt_logprobs = None
    if group.beams is None:
        for sequence, output, has_ended in zip(
            group.sequences, told.outputs, told.has_ended, strict=True
        ):
            sequence.token_ids += output
            if has_ended:
                sequence.status = Status.ENDED
        group.live = [s for s in group.sequences if s.status is not Status.ENDED]
        group.is_one_row = not any(told.outputs)
    return group


def num_sequences(request: Request) -> int:
    """Rows that a request needs at once."""
    return request.params.num_sequences if request.beam is None else request.beam.beam_width


def _new_draw(request: Request, seq_id: int) -> Draw:
    params = request.params
    held_back = request.eos_token_ids.union(params.stop_token_ids)
    return Draw(
        seq_id=seq_id,
        sample_index=0,
        seed=request.seed,
        params=params,
        prompt_len=len(request.prompt_token_ids),
        stop_token_ids=tuple(sorted(held_back)),
        bad_word_ids=request.bad_word_ids,
    )


def _end_ids(request: Request) -> frozenset[int]:
    """Every id that ends a sequence of it."""
    eos_token_ids = frozenset() if request.params.ignore_eos else request.eos_token_ids
    return eos_token_ids.union(request.params.stop_token_ids)
