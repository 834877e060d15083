"""Which beams go on: the choice of one step of beam search, as a function of scores.

Knows no block, no step and no device; beam_tables.py forks and frees by what is chosen. Scores are
summed and compared in float32, as Transformers does in `generate(num_beams=W, do_sample=False)`
(generation/utils.py, version 5), so that ties and near ties fall as they do there.

    W = 2, one end id: the best 4 of all continuations, best first
    parent 0 token 7    -1.0    goes on
    parent 1 END        -1.2    among the best W: a hypothesis
    parent 0 token 3    -1.5    goes on
    parent 0 END        -1.9    not among the best W: dropped
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from ctypes import c_float
from typing import NamedTuple

from jaxpage.sampling_params import BeamSearchParams


class Continuation(NamedTuple):
    """A beam of the next step: a running beam of this one and a token after it."""

    parent: int
    """Place among the running beams."""
    token_id: int
    score: float
    """Sum of the log-probabilities of all its generated tokens."""


class Hypothesis(NamedTuple):
    """A finished beam."""

    score: float
    """`logprob_sum` over generated length ** length_penalty."""
    logprob_sum: float
    token_ids: tuple[int, ...]
    """All generated tokens, the end token included."""
    is_at_limit: bool
    """Finished by its length, not by an end id."""


class BeamSearch:
    """The scores of one request's running beams, and its best finished ones."""

    def __init__(
        self, params: BeamSearchParams, *, end_ids: frozenset[int], max_output: int
    ) -> None:
        """`end_ids`: every id that ends a beam. `max_output`: tokens at which all end."""
        assert max_output >= 1, max_output
        self._params = params
        self._end_ids = end_ids
        self._max_output = max_output
        self._num_output = 0
        self.scores: tuple[float, ...] = (0.0,)
        """One a running beam, best first; the prompt is the first one."""
        self.finished: tuple[Hypothesis, ...] = ()
        """At most beam_width, best first."""
        self.is_done = False

    def advance(
        self, candidates: Seq[Seq[tuple[int, float]]], outputs: Seq[Seq[int]]
    ) -> tuple[Continuation, ...]:
        """The beams of the next step, best first; none when the search is done.

        `candidates`: of each running beam its best `num_candidates` tokens with their
        log-probabilities, best first. `outputs`: what each has generated so far.
        """
        assert not self.is_done and len(candidates) == len(outputs) == len(self.scores)
        width = self._params.beam_width
        best = self._best(candidates)[: num_candidates(self._params, self._end_ids)]
        self._num_output += 1
        is_at_limit = self._num_output >= self._max_output
        ended = [
            self._finish(entry, outputs[entry.parent])
            for entry in best[:width]
            if is_at_limit or entry.token_id in self._end_ids
        ]
        # A stable sort: of equal scores the earlier hypothesis stays.
        merged = sorted((*self.finished, *ended), key=lambda found: -found.score)
        self.finished = tuple(merged[:width])
        going_on = [entry for entry in best if entry.token_id not in self._end_ids][:width]
        if is_at_limit or not going_on or self._is_settled(going_on[0].score):
            self.is_done = True
            going_on = []
        self.scores = tuple(entry.score for entry in going_on)
        return tuple(going_on)

    def _best(self, candidates: Seq[Seq[tuple[int, float]]]) -> list[Continuation]:
        """All continuations, best first; of equal ones the earlier beam's, then the lower id."""
        found = [
            Continuation(parent, token_id, float32(score + logprob))
            for parent, score in enumerate(self.scores)
            for token_id, logprob in candidates[parent]
        ]
        found.sort(key=lambda entry: (-entry.score, entry.parent, entry.token_id))
        return found

    def _finish(self, entry: Continuation, output: Seq[int]) -> Hypothesis:
        return Hypothesis(
            score=self._normalised(entry.score, self._num_output),
            logprob_sum=entry.score,
            token_ids=(*output, entry.token_id),
            is_at_limit=entry.token_id not in self._end_ids,
        )

    def _is_settled(self, best_running: float) -> bool:
        """Whether W have finished and, as early_stopping says, that is enough."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        is_growing = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_output if is_growing else self._num_output
        return self._normalised(best_running, length) <= self.finished[-1].score

    def _normalised(self, score: float, length: int) -> float:
        try:
            divisor = float32(length**self._params.length_penalty)
        except OverflowError:
            divisor = math.inf
        return float32(score / divisor) if divisor else math.copysign(math.inf, score)


def num_candidates(params: BeamSearchParams, end_ids: frozenset[int]) -> int:
    """Continuations to look at in a step: enough that W go on where all ends are among them."""
    return max(2, 1 + len(end_ids)) * params.beam_width


def float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python float."""
    return c_float(value).value
