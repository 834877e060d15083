"""Beam search's choice: a table by hand, and every sequence of a small vocabulary counted out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

import pytest

from jaxpage.host.beam import BeamSearch, Continuation, Hypothesis, float32, num_candidates
from jaxpage.sampling_params import BeamSearchParams

Early = bool | Literal["never"]
Logprobs = Callable[[tuple[int, ...]], list[float]]
VOCAB = 6
END = 5
SETTINGS = pytest.mark.parametrize(
    ("alpha", "early"),
    [(alpha, early) for alpha in (-1.0, 0.0, 1.0, 2.0) for early in (False, True, "never")],
)


def model(seed: int, sharpness: float = 1.0) -> Logprobs:
    """Log-probabilities that depend on all tokens before, in float32."""

    def logprobs(output: tuple[int, ...]) -> list[float]:
        numbers = random.Random(repr((seed, output)))
        logits = [numbers.gauss(0, sharpness) for _ in range(VOCAB)]
        total = math.log(sum(map(math.exp, logits)))
        return [float32(logit - total) for logit in logits]

    return logprobs


def params(width: int, alpha: float = 1.0, early: Early = False) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=width, max_tokens=9, length_penalty=alpha, early_stopping=early
    )


def search(
    logprobs: Logprobs,
    settings: BeamSearchParams,
    *,
    max_output: int,
    end_ids: frozenset[int] = frozenset({END}),
) -> tuple[Hypothesis, ...]:
    """What the engine does with BeamSearch, without an engine."""
    beams, outputs = BeamSearch(settings, end_ids=end_ids, max_output=max_output), [()]
    while not beams.is_done:
        ranked = [sorted(enumerate(logprobs(out)), key=lambda c: (-c[1], c[0])) for out in outputs]
        best = [row[: num_candidates(settings, end_ids)] for row in ranked]
        outputs = [
            (*outputs[entry.parent], entry.token_id) for entry in beams.advance(best, outputs)
        ]
    return beams.finished


def every_sequence(logprobs: Logprobs, max_output: int, alpha: float) -> list[Hypothesis]:
    """All that can be generated, best first."""
    found, open_ones = [], [((), 0.0)]
    for length in range(1, max_output + 1):
        grown = [
            ((*output, token), float32(total + logprob))
            for output, total in open_ones
            for token, logprob in enumerate(logprobs(output))
        ]
        open_ones = []
        for output, total in grown:
            if output[-1] == END or length == max_output:
                score = float32(total / float32(length**alpha))
                found.append(Hypothesis(score, total, output, output[-1] != END))
            else:
                open_ones.append((output, total))
    return sorted(found, key=lambda h: -h.score)


@SETTINGS
@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_all_sequences_finds_the_best(
    alpha: float, early: Early, seed: int
) -> None:
    """156 sequences of up to 3 tokens, at most 25 of them open at once: no beam is dropped."""
    logprobs, max_output, width = model(seed), 3, 125
    found = search(logprobs, params(width, alpha, early), max_output=max_output)
    want = every_sequence(logprobs, max_output, alpha)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert list(found) == want[:width]


@SETTINGS
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_beams_equal_a_plain_retelling(
    alpha: float, early: Early, seed: int, width: int
) -> None:
    for sharpness in (0.5, 2.0):
        logprobs = model(seed, sharpness)
        found = search(logprobs, params(width, alpha, early), max_output=5)
        assert list(found) == retold(logprobs, width, alpha, early, max_output=5)


def retold(
    logprobs: Logprobs, width: int, alpha: float, early: Early, max_output: int
) -> list[Hypothesis]:
    """The search on whole sequences and all of the vocabulary, as tables of [score, output]."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, max_output + 1):
        everything = [
            (float32(total + logprob), (*output, token))
            for total, output in running
            for token, logprob in enumerate(logprobs(output))
        ]
        everything.sort(key=lambda entry: -entry[0])
        for total, output in everything[:width]:
            if output[-1] == END or length == max_output:
                score = float32(total / float32(float(length) ** alpha))
                finished.append(Hypothesis(score, total, output, output[-1] != END))
        finished = sorted(finished, key=lambda h: -h.score)[:width]
        running = [entry for entry in everything if entry[1][-1] != END][:width]
        bound = max_output if early == "never" and alpha > 0 else length
        hope = float32(running[0][0] / float32(float(bound) ** alpha))
        if len(finished) == width and (early is True or hope <= finished[-1].score):
            break
    return finished


def test_a_step_by_hand() -> None:
    beams = BeamSearch(params(2), end_ids=frozenset({END}), max_output=3)
    first = beams.advance([[(7, -0.5), (3, -1.0), (END, -1.5), (2, -3.0)]], [[]])
    assert first == (Continuation(0, 7, -0.5), Continuation(0, 3, -1.0))
    assert not beams.finished  # the end came third: not among the best two
    second = beams.advance(
        [[(END, -0.25), (1, -2.0), (2, -4.0), (3, -5.0)], [(4, -0.5), (END, -1.0), (2, -9.0)]],
        [[7], [3]],
    )
    assert second == (Continuation(1, 4, -1.5), Continuation(0, 1, -2.5))
    assert beams.finished == (Hypothesis(-0.375, -0.75, (7, END), False),)
    assert not beams.advance([[(9, -0.5), (8, -1.0)], [(7, -0.5), (6, -3.0)]], [[3, 4], [7, 1]])
    assert beams.is_done
    assert beams.finished == (
        Hypothesis(-0.375, -0.75, (7, END), False),
        Hypothesis(float32(-2 / 3), -2.0, (3, 4, 9), True),
    )


def test_early_stopping_ends_with_the_second_hypothesis() -> None:
    lengths = {}
    for early in (True, False, "never"):
        beams = BeamSearch(params(2, 1.0, early), end_ids=frozenset({END}), max_output=9)
        beams.advance([[(7, -0.5), (3, -0.5), (1, -9.0), (END, -9.5)]], [[]])
        candidates = [[(END, -4.0), (1, -4.1), (2, -9.0), (3, -9.0)]] * 2
        beams.advance(candidates, [[7], [3]])
        assert len(beams.finished) == 2
        lengths[early] = beams.is_done
    # -4.6 at length 2 can't beat -2.25 as it stands, but -4.6 / 9 could
    assert lengths == {True: True, False: True, "never": False}


@pytest.mark.parametrize(("num_ends", "count"), [(0, 8), (1, 8), (2, 12), (3, 16)])
def test_as_many_candidates_as_can_end(num_ends: int, count: int) -> None:
    assert num_candidates(params(4), frozenset(range(num_ends))) == count


@pytest.mark.parametrize("ends", [frozenset(), frozenset({4, END}), frozenset({1, 2, 3})])
def test_any_number_of_end_ids(ends: frozenset[int]) -> None:
    found = search(model(3), params(2), max_output=6, end_ids=ends)
    assert len(found) == 2
    for hypothesis in found:
        assert not ends.intersection(hypothesis.token_ids[:-1])
        assert hypothesis.is_at_limit == (hypothesis.token_ids[-1] not in ends)
        assert not hypothesis.is_at_limit or len(hypothesis.token_ids) == 6


def test_sums_are_rounded_to_float32_at_every_step() -> None:
    beams = BeamSearch(params(1, 0.0), end_ids=frozenset(), max_output=40)
    output: Seq[int] = []
    total = 0.0
    for _ in range(39):
        (entry,) = beams.advance([[(1, float32(-0.1)), (2, -1.0)]], [output])
        output = [*output, 1]
        total = float32(total + float32(-0.1))
        assert entry.score == total
    assert total != float32(39 * float32(-0.1))


@pytest.mark.parametrize(("alpha", "score"), [(2000.0, -0.0), (-2000.0, -math.inf)])
def test_an_extreme_length_penalty_is_a_score_not_an_overflow(alpha: float, score: float) -> None:
    beams = BeamSearch(params(1, alpha), end_ids=frozenset(), max_output=2)
    beams.advance([[(1, -1.0)]], [[]])
    beams.advance([[(1, -1.0)]], [[1]])
    assert beams.finished[0].score == score


@pytest.mark.parametrize("width", [7, 13, 64])
def test_where_fewer_than_width_exist_all_of_them_come_and_none_twice(width: int) -> None:
    """Transformers fills up with copies at -1e9; what does not exist is left out here."""
    found = search(model(3), params(width), max_output=1)
    assert sorted(each.token_ids[0] for each in found) == list(range(VOCAB))
    found = search(model(3), params(width), max_output=2)
    assert len(found) == len({each.token_ids for each in found}) == min(width, 31)
