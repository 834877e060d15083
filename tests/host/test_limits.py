"""What can never fit is refused with the sum."""

from __future__ import annotations

import pytest

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.errors import CapacityError, PromptCapacityError, RequestError
from jaxpage.host import Request
from jaxpage.host.limits import check_request, length_limit
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

CONFIG = EngineConfig(max_model_len=20)
CACHE = CacheConfig(num_blocks=4, block_size=4)


def ask(num_prompt: int, *, max_tokens: int | None = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request("a", tuple(range(num_prompt)), params, seed=0)


def samples(num_prompt: int, n: int, max_tokens: int) -> Request:
    params = SamplingParams(n=1, best_of=n, max_tokens=max_tokens)
    return Request("a", tuple(range(num_prompt)), params, seed=0)


def beams(num_prompt: int, width: int, max_tokens: int) -> Request:
    beam = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request("a", tuple(range(num_prompt)), params, seed=0, beam=beam)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"),
    [(1, 8), (15, None), (15, 2), (16, 1), (17, 0), (16, 0), (1, 0)],
)
def test_what_can_begin_is_taken(num_prompt: int, max_tokens: int | None) -> None:
    check_request(ask(num_prompt, max_tokens=max_tokens), CONFIG, CACHE)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "arithmetic"),
    [
        (16, 2, "16 tokens that needs 5 blocks of 4 (17 slots)"),  # the second needs a slot
        (16, None, "(17 slots)"),
        (17, 1, "(17 slots)"),
        (18, 0, "18 tokens that needs 5 blocks of 4 (17 slots)"),
    ],
)
def test_a_prompt_that_no_pool_of_this_size_holds(
    num_prompt: int, max_tokens: int | None, arithmetic: str
) -> None:
    with pytest.raises(PromptCapacityError) as raised:
        check_request(ask(num_prompt, max_tokens=max_tokens), CONFIG, CACHE)
    assert arithmetic in str(raised.value) and "pool's 4" in str(raised.value)
    assert isinstance(raised.value, RequestError) and isinstance(raised.value, CapacityError)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(20, 1), (20, None), (21, 0)])
def test_a_prompt_over_the_model_limit(num_prompt: int, max_tokens: int | None) -> None:
    room = CacheConfig(num_blocks=100, block_size=4)
    with pytest.raises(RequestError, match=f"prompt of {num_prompt} tokens.*max_model_len=20"):
        check_request(ask(num_prompt, max_tokens=max_tokens), CONFIG, room)
    check_request(ask(num_prompt - 1, max_tokens=max_tokens), CONFIG, room)


def test_an_empty_prompt() -> None:
    with pytest.raises(RequestError, match="empty prompt"):
        check_request(ask(0), CONFIG, CACHE)


@pytest.mark.parametrize(
    ("num_prompt", "n", "max_tokens", "arithmetic"),
    [
        (6, 4, 2, "6 tokens that needs 5 blocks of 4 (1 shared, 1 for each of 4 sequences)"),
        (8, 3, 8, "8 tokens that needs 5 blocks of 4 (2 shared, 1 for each of 3 sequences)"),
        (3, 5, 2, "3 tokens that needs 5 blocks of 4 (0 shared, 1 for each of 5 sequences)"),
    ],
)
def test_samples_and_beams_that_can_never_begin(
    num_prompt: int, n: int, max_tokens: int, arithmetic: str
) -> None:
    for entry in (samples(num_prompt, n, max_tokens), beams(num_prompt, n, max_tokens)):
        with pytest.raises(PromptCapacityError) as raised:
            check_request(entry, CONFIG, CACHE)
        assert arithmetic in str(raised.value) and "pool's 4" in str(raised.value)
    for fitting in (samples(num_prompt, n - 1, max_tokens), samples(num_prompt, n, 1)):
        check_request(fitting, CONFIG, CACHE)


def test_more_rows_than_a_step_has() -> None:
    config = EngineConfig(max_model_len=20, max_num_seqs=3)
    for entry, name in ((samples(2, 4, 8), "n or best_of=4"), (beams(2, 4, 8), "beam_width=4")):
        with pytest.raises(RequestError, match=f"got {name}, wanted at most max_num_seqs=3"):
            check_request(entry, config, CacheConfig(num_blocks=99, block_size=4))
    check_request(samples(2, 3, 8), config, CacheConfig(num_blocks=99, block_size=4))


@pytest.mark.parametrize(("max_tokens", "limit"), [(8, 11), (0, 3), (17, 20), (18, 20), (None, 20)])
def test_a_sequence_ends_at_the_nearer_limit(max_tokens: int | None, limit: int) -> None:
    assert length_limit(ask(3, max_tokens=max_tokens), CONFIG) == limit
