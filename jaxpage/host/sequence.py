"""The host's own record of what is being completed. Mutable: only the scheduler changes it.

Knows token ids and counts, no blocks. A sequence of two prompt tokens, one step dispatched ahead:

                        token_ids   num_in_flight   num_tokens   num_computed
    admitted            (a b)       0               2            0
    prefill planned     (a b)       1               3            2
    decode planned      (a b)       2               4            3     feeds the first draw
    prefill's draw read (a b c)     1               4            3     feeds the second draw next

A group of samples or beams begins as one row, of its first sequence; the others have no blocks
until that row has drawn. When the group is preempted later, its sequences are prefilled again: each
takes over the blocks of its prefix parent and computes only the tokens after those.
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
    """Has no blocks: new, preempted, or waiting for blocks of its prefix parent."""
    SWAPPED = auto()
    """Its blocks are on the host."""
    RUNNING = auto()
    FINISHING = auto()
    """Its last step is planned and not read yet; has no row and no block any more."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and the sequences that complete it: samples, beams, or just one."""

    request: Request
    arrival: int
    """Grows with each request."""
    sequences: list[Sequence] = field(default_factory=list)
    live: list[Sequence] = field(default_factory=list)
    """Those that have not finished; of beams those in use, best first."""
    beams: BeamSearch | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Those read so far, after a None for the first token; None when not asked for, or told."""
    num_targets: int = 1
    """Leading prompt tokens whose log-probability is read, in flight or not wanted: the first one's
    never is. Preemption leaves it as it is, so that none is asked for twice."""
    is_one_row: bool = True
    """Nothing has been drawn: the first sequence's row stands for all."""
    is_waiting: bool = False
    is_running: bool = False
    last_step: int = 0
    """The last plan that has a row of it; 0 before the first."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first ran; None before."""
    swapped_in_for: int = 0
    """The plan that last brought it back from the host; 0 for none."""
    retry_free_blocks: int = 0
    """It did not fit when last looked at: look again when so many blocks are free."""

    @property
    def primary(self) -> Sequence:
        """The sequence whose row stands for all while the group is one row."""
        return self.live[0]

    @property
    def num_rows_needed(self) -> int:
        """Rows that it may need at once."""
        if len(self.live) == 1 and self.beams is None:
            return int(self.live[0].status is not Status.FINISHING)
        num_going_on = sum(sequence.status is not Status.FINISHING for sequence in self.live)
        return len(self.sequences) if num_going_on and self.beams is not None else num_going_on

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
    """One completion being made."""

    seq_id: int
    group: SequenceGroup
    token_ids: list[int]
    """The prompt, then the output that has been read."""
    prompt_len: int
    sample_index: int
    max_len: int
    """Tokens, prompt included, at which it finishes by length."""
    draw: Draw
    """What is asked of every step that draws; the history is filled in where needed."""
    own_draws: tuple[Draw, ...] | None = None
    """`(draw,)` where every step asks the same; None where its history changes."""
    status: Status = Status.WAITING
    num_computed: int = 0
    """Tokens whose KV write has been dispatched."""
    num_in_flight: int = 0
    """Drawn tokens that have not been read."""
    prefill_len: int = 0
    """Tokens to feed before decoding, as of the last admission."""
    last_step: int = 0
    """The last plan that has a row of it; 0 before the first."""
    draw_id: int = 0
    """Its draw's place in that plan; means nothing while num_in_flight is 0."""
    prefix_parent: Sequence | None = None
    """The sequence whose leading blocks it takes over once they are computed; None: none does."""
    num_inherited_blocks: int = 0
    """How many it takes over."""
    candidates: Candidates | None = None
    """A beam's, read and not yet chosen from."""

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is drawn: only log-probabilities of the prompt are asked for."""
        return self.max_len == self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    @property
    def num_to_prefill(self) -> int:
        """Tokens to feed when admitted now. The last token of a prompt predicts output only."""
        return len(self.token_ids) - self.is_prompt_only

    @property
    def is_last_step_planned(self) -> bool:
        """Certain to finish by length once what is in flight has been read."""
        if self.max_len == self.prompt_len:
            return self.num_computed == self.prompt_len - 1
        return len(self.token_ids) + self.num_in_flight >= self.max_len


def new_group(request: Request, first_seq_id: int, max_len: int) -> SequenceGroup:
    """A request's sequences that have yet to run, with ids from `first_seq_id` on."""
    params, beam = request.params, request.beam
    prompt_logprobs: list[TokenLogprob | None] | None = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None]
    group = SequenceGroup(request, arrival=first_seq_id, prompt_logprobs=prompt_logprobs)
    draw = _new_draw(request, first_seq_id)
    if beam is not None:
        draw = replace(draw, num_candidates=num_candidates(beam, request.end_ids))
        max_output = max_len - len(request.prompt_token_ids)
        group.beams = BeamSearch(beam, end_ids=request.end_ids, max_output=max_output)
    for index in range(request.num_sequences):
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
    """A new group with the tokens that have been told of it, as if it had been preempted.

    Reads of `known` only what never changes, and what has been counted.
    """
    group = new_group(known.request, known.arrival, known.sequences[0].max_len)
    group.num_preemptions = known.num_preemptions
    group.num_cached_tokens = known.num_cached_tokens
    if told.has_prompt_logprobs:
        group.prompt_logprobs = None
    if group.beams is None:
        for sequence, output, is_finished in zip(
            group.sequences, told.outputs, told.is_finished, strict=True
        ):
            sequence.token_ids += output
            if is_finished:
                sequence.status = Status.FINISHED
        group.live = [s for s in group.sequences if s.status is not Status.FINISHED]
        group.is_one_row = not any(told.outputs)
    return group


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
