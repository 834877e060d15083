"""Settings of draws as arrays: each in its own row, padding greedy, sent only when they change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpage.config import EngineConfig
from jaxpage.device.placement import Placement
from jaxpage.device.sampling.sample import sample
from jaxpage.device.types import DrawInput
from jaxpage.engine.sampling_inputs import (
    MAX_STOP_IDS,
    SHORT_HISTORY_TOKENS,
    STAGES,
    Limits,
    SamplingBuilder,
    Stage,
    check_fits,
)
from jaxpage.errors import RequestError
from jaxpage.host.plan import Draw, Request
from jaxpage.sampling_params import MAX_LOGPROBS, SamplingParams

VOCAB = 100


def draw(seq_id: int, history: tuple[int, ...] = (), **params: Any) -> Draw:
    """A draw after a prompt of 3 tokens."""
    return Draw(
        seq_id=seq_id,
        sample_index=0,
        seed=(7 << 32) + seq_id,
        params=SamplingParams(**params),
        prompt_len=3,
        stop_token_ids=(2, 9),
        history=history,
    )


def request(**params: Any) -> Request:
    return Request("a", (1, 5), SamplingParams(**params), seed=0, eos_token_ids=frozenset({2}))


@pytest.fixture
def builder() -> SamplingBuilder:
    return SamplingBuilder(
        EngineConfig(max_model_len=2 * SHORT_HISTORY_TOKENS), VOCAB, Placement(), STAGES
    )


def test_each_draw_has_its_row_and_padding_is_greedy(builder: SamplingBuilder) -> None:
    draws = (draw(1, temperature=0.5, top_k=-1, top_p=0.9), draw(2, temperature=2.0, top_k=10**6))
    sampling, num_top = builder.build(draws, 4)
    assert num_top == 0 and sampling.states == (None, None)
    assert np.asarray(sampling.temperature).tolist() == [0.5, 2.0, 0.0, 0.0]
    assert np.asarray(sampling.top_k).tolist() == [0, VOCAB, 0, 0]
    assert np.asarray(sampling.top_p).tolist() == pytest.approx([0.9, 1.0, 1.0, 1.0])
    assert np.asarray(sampling.seed_words).tolist() == [[7, 1], [7, 2], [0, 0], [0, 0]]


def test_edits_of_one_draw_leave_the_others_alone(builder: SamplingBuilder) -> None:
    edited = draw(1, logit_bias={5: -1.5}, allowed_token_ids=(0, 33), min_tokens=4)
    sampling, _ = builder.build((edited, draw(2, logprobs=1)), 2)
    edits, history = sampling.states
    assert history is None
    assert edits is not None
    assert np.asarray(edits.bias_ids)[:, :2].tolist() == [[5, VOCAB], [VOCAB, VOCAB]]
    assert np.asarray(edits.bias_values)[:, :2].tolist() == [[-1.5, 0.0], [0.0, 0.0]]
    assert np.asarray(edits.allowed).tolist() == [[1, 2, 0, 0], [0xFFFFFFFF] * 4]
    assert np.asarray(edits.stop_ids)[:, :3].tolist() == [[2, 9, VOCAB], [VOCAB] * 3]
    assert np.asarray(edits.min_position).tolist() == [3 + 4, 0]


@pytest.mark.parametrize(("length", "width"), [(0, 512), (512, 512), (513, 1024), (1024, 1024)])
def test_a_history_is_short_or_as_long_as_the_model(
    builder: SamplingBuilder, length: int, width: int
) -> None:
    history = tuple(range(50)) * 21
    sampling, _ = builder.build((draw(1, history[:length], presence_penalty=1.0), draw(2)), 2)
    _, found = sampling.states
    assert found is not None and found.tokens.shape == (2, width)
    assert np.asarray(found.tokens)[0].tolist() == [*history[:length]] + [VOCAB] * (width - length)
    assert np.asarray(found.lengths).tolist() == [length, 0]
    assert np.asarray(found.presence).tolist() == [1.0, 0.0]


def test_settings_stay_on_the_device_until_the_batch_changes(builder: SamplingBuilder) -> None:
    first, _ = builder.build((draw(1), draw(2)), 2)
    again, num_top = builder.build((draw(1), draw(2)), 2)
    assert again is first
    other, num_top = builder.build((draw(1), draw(3, logprobs=0), draw(4, logprobs=2)), 4)
    assert other is not first and num_top == MAX_LOGPROBS


def test_a_sequence_id_that_means_another_sequence_brings_its_own_settings(
    builder: SamplingBuilder,
) -> None:
    """As a second scheduler over the same device does: its ids begin anew."""
    first, _ = builder.build((draw(1, temperature=0.5),), 1)
    for other in (draw(1, temperature=0.7), replace(draw(1, temperature=0.5), seed=9)):
        settings, _ = builder.build((other,), 1)
        assert settings is not first
        assert np.asarray(settings.temperature)[0] == np.float32(other.params.temperature)
        assert np.asarray(settings.seed_words).tolist() == [list(divmod(other.seed, 1 << 32))]
    for change in (
        {"prompt_len": 5}, {"stop_token_ids": (4,)}, {"sample_index": 1}, {"num_candidates": 30},
    ):  # fmt: skip
        old, _ = builder.build((draw(1, min_tokens=2),), 1)
        new, num_top = builder.build((replace(draw(1, min_tokens=2), **change),), 1)
        assert new is not old, change
        assert (num_top > 0) == ("num_candidates" in change)


def test_a_history_that_grows_does_not_send_the_settings_again(builder: SamplingBuilder) -> None:
    first, _ = builder.build((draw(1, (1, 2), presence_penalty=1.0),), 1)
    again, _ = builder.build((draw(1, (1, 2, 3), presence_penalty=1.0),), 1)
    assert again.temperature is first.temperature
    assert again.states[1] is not first.states[1]


def test_more_min_tokens_than_any_length_hold_the_ends_back_for_ever(
    builder: SamplingBuilder,
) -> None:
    settings, _ = builder.build((draw(1, min_tokens=10**12, max_tokens=None),), 1)
    assert settings.states[0].min_position.tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": range(3, 3 + MAX_STOP_IDS), "min_tokens": 1},  # with the end of text 65
        {"stop_token_ids": [VOCAB]},
        {"allowed_token_ids": [VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
    ],
    ids=str,
)
def test_what_no_step_can_hold_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="got "):
        check_fits(request(**params), VOCAB)


def test_stop_ids_that_are_not_held_back_have_no_bound() -> None:
    check_fits(request(stop_token_ids=range(3, VOCAB)), VOCAB)


@pytest.mark.slow
def test_a_stage_of_ones_own_is_packed_and_applied_after_the_others() -> None:
    def pack(draws: tuple[Draw, ...], num_draws: int, limits: Limits) -> np.ndarray | None:
        if not any(draw.params.top_k == 7 for draw in draws):
            return None
        state = np.zeros((num_draws, limits.vocab_size), np.float32)
        for place, each in enumerate(draws):
            state[place, 5] = 100 * (each.params.top_k == 7)
        return state

    def apply(logits: Array, state: Array, draw: DrawInput) -> Array:
        return logits + state

    stages = (*STAGES, Stage(pack, apply))
    builder = SamplingBuilder(EngineConfig(max_model_len=64), VOCAB, Placement(), stages)
    settings, _ = builder.build((draw(1, top_k=7, temperature=0.0), draw(2, temperature=0.0)), 4)
    assert [state is None for state in settings.states] == [True, True, False]
    nothing, _ = builder.build((draw(2, temperature=0.0),), 4)
    assert nothing.states == (None, None, None)
    given = DrawInput(jnp.zeros((4, 1)), jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32))
    logits = jnp.zeros((4, VOCAB)).at[:, 9].set(1.0)
    applied = tuple(stage.apply for stage in stages)
    out = sample(logits, given, settings, stages=applied)
    assert out.token_ids.tolist() == [5, 9, 9, 9]


def test_a_stage_that_changes_may_begin_and_end_with_any_step() -> None:
    """Two stages whose state comes and goes with the tokens, and the settings stay the same."""

    def after(length: int) -> Stage:
        def pack(draws: tuple[Draw, ...], num_draws: int, limits: Limits) -> Any | None:
            is_due = any(len(draw.history) == length for draw in draws)
            return np.full(num_draws, length, np.int32) if is_due else None

        return Stage(pack, lambda logits, state, draw: logits, changes=True)

    stages = (after(4), after(5))
    builder = SamplingBuilder(EngineConfig(max_model_len=64), VOCAB, Placement(), stages)
    seen = []
    for length in (3, 4, 5, 6):
        settings, _ = builder.build((draw(1, history=(7,) * length),), 1)
        seen.append([None if state is None else int(state[0]) for state in settings.states])
    assert seen == [[None, None], [4, None], [None, 5], [None, None]]
