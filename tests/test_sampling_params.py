"""Settings of a request: what is out of range, and numbers as callers have them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import BeamSearchParams, RequestError, SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"temperature": np.float32("nan")},
        {"repetition_penalty": 1e300},
        {"logit_bias": {5: -1e300}},
        {"ignore_eos": "false"},
        {"detokenize": None},
        {"skip_special_tokens": 1},
        {"stop_token_ids": 5},
        {"stop": 5},
        {"seed": np.int64(-2)},
        {"logprobs": False},
        {"stop_token_ids": jnp.array([1.5])},
        {"stop_token_ids": ["7"]},
        {"n": jnp.array([3])},
        {"allowed_token_ids": np.array([True])},
        {"logit_bias": np.array([1.0])},
        {"temperature": "0.5"},
        {"max_tokens": np.float32(1)},
        {"allowed_token_ids": np.array([], np.int32)},
        {"stop": np.array(7)},
        {"logprobs_mode": np.array(["raw", "raw"])},
        {"logits_processors": 5},
        {"logits_processors": np.array(5)},
    ],
    ids=str,
)
def test_what_no_device_could_use_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"got {next(iter(wrong))}.*, wanted .*; change "):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_taken_for_what_they_are() -> None:
    numbers: dict[str, Any] = {
        "max_tokens": np.int64(5),
        "seed": np.uint64(2**64 - 1),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([3, 4]),
        "allowed_token_ids": np.array([7], np.int32),
        "logit_bias": {np.int32(7): np.float64(1.5)},
    }
    given = SamplingParams(**numbers)
    assert given == SamplingParams(
        max_tokens=5,
        seed=2**64 - 1,
        temperature=0.5,
        stop_token_ids=(3, 4),
        allowed_token_ids=(7,),
        logit_bias={7: 1.5},
    )
    assert type(given.seed) is type(given.stop_token_ids[0]) is int


def test_arrays_of_texts_and_flags_are_taken_as_these() -> None:
    texts: dict[str, Any] = {
        "stop": np.array("a"),
        "bad_words": np.array(["a", "b"]),
        "logprobs_mode": np.array("raw"),
        "ignore_eos": np.array(True),
    }
    given = SamplingParams(**texts)
    assert given == SamplingParams(stop="a", bad_words=("a", "b"), ignore_eos=True)
    assert hash(given) and type(given.stop[0]) is type(given.bad_words[0]) is str
    flags: dict[str, Any] = {"ignore_eos": np.bool_(True), "early_stopping": jnp.array(True)}
    beams = BeamSearchParams(beam_width=2, max_tokens=3, **flags)
    assert (beams.ignore_eos, beams.early_stopping) == (True, True)


def test_an_array_that_was_donated_is_refused_in_a_line() -> None:
    gone = jnp.array(0.5)
    gone.delete()
    with pytest.raises(RequestError, match=r"got an array that can't be read .*, wanted one"):
        SamplingParams(temperature=gone)  # pyright: ignore[reportArgumentType]  # as callers do


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": True},
        {"beam_width": 0},
        {"max_tokens": 0},
        {"length_penalty": float("nan")},
        {"early_stopping": 1},  # equal to True, and yet not it
        {"early_stopping": None},
        {"ignore_eos": "no"},
        {"stop_token_ids": [-1]},
    ],
    ids=str,
)
def test_what_no_beam_search_could_use_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"got {next(iter(wrong))}.*, wanted .*; change "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong})


def test_beams_take_numbers_of_numpy() -> None:
    given = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.5, stop_token_ids=(7,))
    numbers: dict[str, Any] = {
        "beam_width": np.int64(2),
        "max_tokens": np.int32(3),
        "length_penalty": np.float32(0.5),
        "stop_token_ids": np.array([7]),
    }
    assert BeamSearchParams(**numbers) == given
    assert type(BeamSearchParams(**numbers).beam_width) is int


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
def test_scalars_and_arrays_of_any_library_are_numbers(array: Any) -> None:
    given = SamplingParams(
        n=array(2),
        seed=array(3),
        temperature=array(0.5),
        stop_token_ids=[array(3), 4],
        allowed_token_ids=array([7]),
        logit_bias={7: array(1.5)},
        ignore_eos=array(True),
        logprobs=array(2),
    )
    assert given == SamplingParams(
        n=2,
        seed=3,
        temperature=0.5,
        stop_token_ids=(3, 4),
        allowed_token_ids=(7,),
        logit_bias={7: 1.5},
        ignore_eos=True,
        logprobs=2,
    )
    assert type(given.n) is int and type(given.temperature) is float and given.ignore_eos is True


def test_what_vllm_takes_is_taken_as_there() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=np.int64(-1)) == SamplingParams()
    ones = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (ones.logprobs, ones.prompt_logprobs) == (1, 1) and type(ones.logprobs) is int
    assert SamplingParams(temperature=3.0).temperature == 3.0


def test_settings_with_a_logit_bias_hash_and_stay_as_they_are() -> None:
    pairs = {7: 1.5, 3: -2.0}
    given, same = SamplingParams(logit_bias=pairs), SamplingParams(logit_bias={3: -2, 7: 1.5})
    assert given == same and hash(given) == hash(same)
    assert given != SamplingParams(logit_bias={7: 1.5}) and given.logit_bias == pairs
    pairs[9] = 1.0
    assert dict(given.logit_bias or {}) == {7: 1.5, 3: -2.0}
    with pytest.raises(TypeError):
        given.logit_bias[5] = 1.0  # type: ignore[index]  # what is refused
    for again in (copy.deepcopy(given), pickle.loads(pickle.dumps(given)), replace(given, seed=1)):
        assert again.logit_bias == given.logit_bias


def test_settings_of_other_stages_are_carried_as_they_are() -> None:
    given = SamplingParams(extra_args={"depth": [1, 2]})
    assert given == SamplingParams(extra_args={"depth": [1, 2]}) != SamplingParams()
    for again in (copy.deepcopy(given), pickle.loads(pickle.dumps(given)), replace(given, seed=1)):
        assert again.extra_args == {"depth": [1, 2]}
    assert isinstance(hash(given), int)
    for wrong in ([1], {1: 2}):
        with pytest.raises(RequestError, match="extra_args"):
            SamplingParams(extra_args=wrong)  # type: ignore[arg-type]  # what is refused
