"""Swap and recompute, priorities and prefix hits: whichever way room is made, the same tokens."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from jaxpage.host.policy import PressureCosts
from tests.host.driver import BOTH_DEPTHS, engine, prompt, shape
from tests.host.fake import beam_request, request

Mode = Literal["auto", "recompute", "swap"]
CHEAP_TOKENS = PressureCosts(seconds_per_token=1e-9)
DEAR_TOKENS = PressureCosts(seconds_per_token=1.0)


@BOTH_DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_both_ways_say_the_same(depth: int, mode: Mode, caching: bool) -> None:
    driver = engine(
        num_blocks=10,
        depth=depth,
        num_swap_blocks=10,
        preemption=mode,
        enable_prefix_caching=caching,
    )
    batch = [request(str(i), prompt(10, i), max_tokens=20) for i in range(12)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    counters = driver.scheduler.counters
    assert (counters.preemptions_swap > 0) == (mode == "swap")
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    assert (counters.swapped_out_blocks > 0) == (mode == "swap")
    assert max(driver.news[str(i)].num_preemptions for i in range(12)) <= 3
    driver.check_idle()


@BOTH_DEPTHS
def test_a_host_pool_too_small_for_anybody_is_no_deadlock(depth: int) -> None:
    driver = engine(num_blocks=10, depth=depth, num_swap_blocks=4, preemption="swap")
    batch = [request(str(i), prompt(10, i), max_tokens=20) for i in range(12)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    assert driver.scheduler.counters.preemptions_recompute


@pytest.mark.parametrize("costs", [CHEAP_TOKENS, DEAR_TOKENS])
def test_auto_takes_the_cheaper(costs: PressureCosts) -> None:
    driver = engine(num_blocks=8, num_swap_blocks=20, costs=costs)
    for index in range(3):
        driver.add(request(str(index), prompt(8, index), max_tokens=16))
    driver.run()
    counters = driver.scheduler.counters
    assert bool(counters.preemptions_swap) == (costs is DEAR_TOKENS)
    assert bool(counters.preemptions_recompute) == (costs is CHEAP_TOKENS)


@BOTH_DEPTHS
def test_swap_goes_on_when_the_host_is_full(depth: int) -> None:
    driver = engine(num_blocks=12, depth=depth, num_swap_blocks=3, preemption="swap")
    batch = [request(str(i), prompt(6, i), max_tokens=24) for i in range(30)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    assert all(plan.rows for plan in driver.plans)


@BOTH_DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_a_gang_goes_and_comes_back_whole(depth: int, mode: Mode, kind: str) -> None:
    driver = engine(num_blocks=16, depth=depth, num_swap_blocks=16, preemption=mode)
    old = request("old", prompt(8), max_tokens=40)
    gang = beam_request("gang", prompt(9, 3), 3, max_tokens=12)
    if kind == "samples":
        gang = request("gang", prompt(9, 3), n=3, temperature=1.0, max_tokens=12)
    driver.add(old)
    driver.add(gang)
    driver.run()
    driver.check_done(old)
    driver.check_done(gang)
    assert driver.news["old"].num_preemptions == 0
    driver.check_idle()


@BOTH_DEPTHS
def test_a_swapped_request_is_aborted(depth: int) -> None:
    driver = engine(num_blocks=8, depth=depth, num_swap_blocks=8, preemption="swap")
    batch = [request(str(i), prompt(8, i), max_tokens=16) for i in range(3)]
    for entry in batch:
        driver.add(entry)
    for _ in range(40):
        if driver.scheduler.counters.preemptions_swap:
            break
        driver.step()
    assert driver.scheduler.counters.preemptions_swap and driver.scheduler.abort("2")
    driver.scheduler.check_integrity()
    driver.run()
    driver.check_done(batch[0])
    driver.check_done(batch[1])
    driver.check_idle()


@BOTH_DEPTHS
def test_priorities_under_pressure(depth: int) -> None:
    """Each ends exactly once, says what it says alone, and the first in rank never gives way."""
    driver = engine(num_blocks=6, block_size=16, depth=depth, max_num_batched_tokens=15)
    batch = [request(str(i), prompt(20, i), max_tokens=40, priority=4 - i) for i in range(5)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    assert driver.news["4"].num_preemptions == 0
    assert driver.scheduler.counters.generated_tokens == 5 * 40
    assert shape(driver.plans[0])[0][0] == driver.seq_ids["4"]


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


def test_no_stream_stalls_behind_a_long_prompt() -> None:
    driver = engine(max_num_batched_tokens=8)
    driver.add(request("short", prompt(4), max_tokens=20))
    driver.step()
    driver.add(request("long", prompt(60), max_tokens=2))
    driver.run()
    first = [plan.rows[0].seq_id for plan in driver.plans[:20]]
    assert first == [1] * 20
    assert all(plan.num_tokens <= 8 for plan in driver.plans)
