"""Prompts as callers hand them over: what is no text and no ids is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxpage.config import ModelConfig
from jaxpage.engine.requests import RequestFactory, check_prompts
from jaxpage.errors import RequestError
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import ChatPrompt, load_tokenizer
from tests.engine.fakes import LetterTokenizer
from tests.tiny import MODEL_DIR

CONFIG = ModelConfig(500, 64, 160, 3, 4, 2, 16, 512)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ("caf\udce9", SamplingParams(), "a prompt with .* at character 3"),
        ("ok", SamplingParams(bad_words=("\ud800",)), "a bad word with .* at character 0"),
        (b"abc", SamplingParams(), "got prompt="),
        ([1, 2.0], SamplingParams(), "got 2.0 among"),
    ],
)
def test_what_is_no_prompt_is_refused(
    prompt: str | list[int], params: SamplingParams, named: str
) -> None:
    factory = RequestFactory(load_tokenizer(MODEL_DIR), CONFIG, num_token_ids=500, seed=0)
    with pytest.raises(RequestError, match=named):
        factory.build("a", prompt, params)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(stop=("a",)), SamplingParams(bad_words=("a",))],
    ids=["stop", "bad_words"],
)
def test_what_is_said_of_text_wants_a_tokenizer(params: SamplingParams) -> None:
    factory = RequestFactory(None, CONFIG, num_token_ids=500, seed=0)
    with pytest.raises(RequestError, match=r"got (stop|bad_words) and no tokenizer, wanted"):
        factory.build("a", [1], params)


def test_ends_are_those_of_config_and_tokenizer() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    config = replace(CONFIG, eos_token_ids=(7, 499, 600))
    with pytest.warns(UserWarning, match=r"got 1 end-of-text ids .* the first 600 of 500 ids"):
        factory = RequestFactory(tokenizer, config, num_token_ids=500, seed=0)
    built = factory.build("a", [1], SamplingParams())
    assert built.eos_token_ids == {7, 499, *tokenizer.eos_token_ids}
    assert RequestFactory(None, CONFIG, num_token_ids=500, seed=0).build(
        "a", [1], SamplingParams()
    ).eos_token_ids == frozenset(CONFIG.eos_token_ids)


def test_nothing_is_added_to_what_a_chat_template_wrote() -> None:
    class AddsFive(LetterTokenizer):
        """A caller's own, which doesn't know what a ChatPrompt is."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [5] * add_special_tokens + super().encode(text)

    factory = RequestFactory(AddsFive(), CONFIG, num_token_ids=500, seed=0)
    assert factory.encode("ab") == (5, 0, 1)
    assert factory.encode(ChatPrompt("ab")) == (0, 1)


@pytest.mark.parametrize("prompts", [{"prompt": "hi"}, b"hi", 5, None], ids=str)
def test_what_is_no_list_of_prompts_is_refused(prompts: object) -> None:
    with pytest.raises(RequestError, match="got prompts of type"):
        check_prompts(prompts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": "high"},
        {"priority": None},
        {"priority": float("nan")},
        {"priority": True},
        {"cache_salt": 5},
        {"request_id": 5},
    ],
    ids=str,
)
def test_what_would_upset_the_queue_is_refused(wrong: dict[str, Any]) -> None:
    factory = RequestFactory(None, CONFIG, num_token_ids=500, seed=0)
    fields = {"request_id": "a", "prompt": [1], "params": SamplingParams(), **wrong}
    with pytest.raises(RequestError, match=f"got {next(iter(wrong))}=.*, wanted .*; "):
        factory.build(**fields)


def test_a_priority_may_be_a_number_of_numpy() -> None:
    factory = RequestFactory(None, CONFIG, num_token_ids=500, seed=0)
    priority: Any = np.int64(-3)
    built = factory.build("a", [1], SamplingParams(), priority=priority)
    assert built.priority == -3 and type(built.priority) is int


class Panic(BaseException):
    """As Rust's libraries raise it."""


@pytest.mark.parametrize("made", [KeyError("x"), Panic("x"), None, [1.5]], ids=repr)
def test_a_tokenizer_that_fails_is_the_requests_error(made: Any) -> None:
    class Failing:
        eos_token_ids: tuple[int, ...] = ()

        def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            if isinstance(made, BaseException):
                raise made
            return made

    failing: Any = Failing()
    factory = RequestFactory(failing, CONFIG, num_token_ids=500, seed=0)
    for encode in (factory.encode, factory.encode_completion):
        with pytest.raises(RequestError, match=r"got a tokenizer that failed .*; mend it"):
            encode("text")
