"""Prompts in every form that callers have: lists and arrays of any library are the same ids."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.config import ModelConfig
from jaxpage.engine.requests import RequestFactory, as_params, as_prompts
from jaxpage.errors import ConfigError, RequestError
from jaxpage.sampling_params import SamplingParams

CONFIG = ModelConfig(500, 64, 160, 3, 4, 2, 16, 512)
IDS = [5, 9, 11]


class Tensor:
    """What torch's and other libraries' arrays have in common."""

    def __init__(self, values: Any) -> None:
        self._array = np.array(values)
        self.ndim, self.dtype = self._array.ndim, self._array.dtype

    def tolist(self) -> Any:
        return self._array.tolist()


def encoded(prompts: Any) -> list[tuple[int, ...]]:
    factory = RequestFactory(None, CONFIG, num_token_ids=500, seed=0)
    return [factory.encode(prompt) for prompt in as_prompts(prompts)]


@pytest.mark.parametrize("array", [np.array, jnp.array, Tensor], ids=["numpy", "jax", "other"])
def test_arrays_are_the_ids_that_they_hold(array: Any) -> None:
    one = [tuple(IDS)]
    assert encoded(array(IDS)) == encoded([array(IDS)]) == encoded(array([IDS])) == one
    assert encoded([array(value) for value in IDS]) == one
    assert encoded([[array(value) for value in IDS], array([7])]) == [*one, (7,)]
    assert encoded(array([IDS, IDS])) == one * 2
    assert all(type(value) is int for value in encoded(array(IDS))[0])


def test_an_array_without_values_is_its_own_prompts_error() -> None:
    gone = jnp.array(IDS)
    gone.delete()
    one, other = as_prompts([gone, IDS])
    assert isinstance(one, RequestError) and "can't be read" in str(one) and other == IDS
    with pytest.raises(RequestError, match="can't be read"):
        as_prompts(gone)  # pyright: ignore[reportArgumentType]  # as callers do


@pytest.mark.parametrize("params", [5, object()])
def test_what_is_no_settings_is_refused(params: Any) -> None:
    with pytest.raises(ConfigError, match="as sampling params, wanted SamplingParams"):
        as_params(params, 1)


@pytest.mark.parametrize("prompt", [[], "text", np.array(["text"])], ids=str)
def test_what_is_no_array_of_ids_is_as_before(prompt: Any) -> None:
    assert as_prompts(prompt) == ([prompt] if isinstance(prompt, str) else list(prompt))


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1.0, 2.0]),
        jnp.array([True, False]),
        np.array(["a", "b"]).reshape(1, 2),
        np.zeros((1, 2, 2), np.int32),
        [1, "a"],
        [1, None],
        [jnp.array(1.5)],
        np.array([], np.int32),
        np.zeros((1, 0), np.int32),
        [{"prompt": "a"}],
        [np.bool_(True)],
    ],
    ids=repr,
)
def test_what_holds_no_ids_is_a_request_error(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"got .*, wanted .*; "):
        found = encoded(prompt)
        assert not found, found
        raise RequestError("got no prompts, wanted some; none is what an empty list means")


def test_a_scalar_is_no_list_of_prompts() -> None:
    for scalar in (np.int32(5), jnp.array(5), Tensor(5)):
        with pytest.raises(RequestError, match="got prompts of type int"):
            as_prompts(scalar)  # type: ignore[arg-type]  # what is refused


def test_a_request_takes_an_array() -> None:
    factory = RequestFactory(None, CONFIG, num_token_ids=500, seed=0)
    prompt: Any = jnp.array(IDS)
    assert factory.build("a", prompt, SamplingParams()).prompt_token_ids == tuple(IDS)
