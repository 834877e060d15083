"""What a group finds in the prefix cache when it begins to run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.host.driver import BOTH_DEPTHS, engine, prompt, shape
from tests.host.fake import request


@BOTH_DEPTHS
def test_a_shared_prompt_is_found_again(depth: int) -> None:
    driver = engine(depth=depth, enable_prefix_caching=True)
    batch = [request(str(i), [*prompt(18), i], seed=i) for i in range(3)]
    for entry in batch:
        driver.add(entry)
        driver.run()
        driver.check_done(entry)
    assert [driver.news[str(i)].num_cached_tokens for i in range(3)] == [0, 16, 16]
    assert driver.scheduler.counters.prefix_hit_tokens == 32
    again = request("again", prompt(16))
    driver.add(again)
    driver.run()
    driver.check_done(again)
    assert driver.news["again"].num_cached_tokens == 12  # the last token is computed


def test_only_what_was_dispatched_is_found() -> None:
    driver = engine(enable_prefix_caching=True)
    for name in ("a", "b"):
        driver.add(request(name, prompt(16)))
    driver.run()
    assert [driver.news[name].num_cached_tokens for name in ("a", "b")] == [0, 0]
    assert shape(driver.plans[0]) == [(1, 0, 16), (2, 0, 16)]


@pytest.mark.parametrize("why", ["salt", "reset", "prompt_logprobs", "off"])
def test_what_finds_nothing(why: str) -> None:
    driver = engine(enable_prefix_caching=why != "off")
    driver.add(request("a", prompt(16)))
    driver.run()
    if why == "reset":
        driver.scheduler.reset_prefix_cache()
    params: dict[str, Any] = {"prompt_logprobs": 0} if why == "prompt_logprobs" else {}
    entry = request("b", prompt(16), salt="x" if why == "salt" else None, **params)
    driver.add(entry)
    driver.run()
    driver.check_done(entry)
    assert driver.news["b"].num_cached_tokens == driver.scheduler.counters.prefix_hit_tokens == 0


@BOTH_DEPTHS
def test_what_a_preempted_request_finds_again_is_no_hit(depth: int) -> None:
    driver = engine(num_blocks=8, depth=depth, enable_prefix_caching=True)
    for index in range(3):
        driver.add(request(str(index), prompt(8, index), max_tokens=16))
    driver.run()
    assert driver.scheduler.counters.preemptions_recompute
    assert driver.scheduler.counters.prefix_hit_tokens == 0
