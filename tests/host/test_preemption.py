"""Which group is preempted when blocks run out, what that keeps and what it must not cost."""

from __future__ import annotations

from typing import Literal

import pytest

from jaxpage.host.policy import PreemptionCosts
from jaxpage.host.preemption import preempt
from tests.host.driver import BOTH_DEPTHS, engine, prompt, shape
from tests.host.fake import beam_request, expected, request

Mode = Literal["auto", "recompute", "swap"]
CHEAP_TOKENS = PreemptionCosts(seconds_per_token=1e-9)
DEAR_TOKENS = PreemptionCosts(seconds_per_token=1.0)


@BOTH_DEPTHS
def test_the_newest_is_preempted_and_no_token_changes(depth: int) -> None:
    driver = engine(num_blocks=8, depth=depth)
    batch = [request(str(i), prompt(8, i), max_tokens=16) for i in range(3)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    driver.check_idle()
    counts = [driver.news[str(i)].num_preemptions for i in range(3)]
    assert counts[0] == 0 and sum(counts) == driver.scheduler.counters.preemptions_recompute > 0
    reported = [seq_id for preempted in driver.preempted for seq_id in preempted]
    assert sorted(reported) == [2] * counts[1] + [3] * counts[2]
    assert driver.scheduler.counters.prompt_tokens == 24  # once each, however often recomputed
    ends = [name for name in ("0", "1", "2") if driver.news[name].ends]
    assert ends == ["0", "1", "2"]


def test_one_is_preempted_for_all_that_need_a_block() -> None:
    """Its blocks come back with the step in flight: no other need be preempted."""
    driver = engine(num_blocks=10, depth=1)
    batch = [request(str(i), prompt(7, i), max_tokens=12) for i in range(3)]
    for entry in batch:
        driver.add(entry)
    while not driver.scheduler.counters.preemptions_recompute:
        driver.step()
    assert shape(driver.plans[-1]) == [(1, 12, 1)] and driver.preempted[-1] == (3,)
    driver.step()
    assert shape(driver.plans[-1]) == [(1, 13, 1), (2, 12, 1)]
    driver.run()
    assert driver.scheduler.counters.preemptions_recompute == 1
    for entry in batch:
        driver.check_done(entry)


@BOTH_DEPTHS
def test_no_group_joins_only_to_be_preempted(depth: int) -> None:
    driver = engine(num_blocks=5, depth=depth)
    driver.add(request("old", prompt(8), max_tokens=8))
    driver.step()
    driver.add(request("new", prompt(8), max_tokens=2))  # its two blocks are free: no third is
    driver.run()
    assert driver.scheduler.counters.preemptions_recompute == 0
    assert [len(plan.rows) for plan in driver.plans] == [1] * 10
    driver.check_idle()


@BOTH_DEPTHS
def test_a_preempted_prompt_above_the_chunk_budget_is_not_preempted_over_and_over(
    depth: int,
) -> None:
    driver = engine(num_blocks=30, depth=depth, max_num_batched_tokens=8)
    batch = [request(str(i), prompt(40, i), max_tokens=40) for i in range(4)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    counts = [driver.news[entry.request_id].num_preemptions for entry in batch]
    assert max(counts) in (1, 2, 3), counts
    for entry in batch:
        driver.check_done(entry)  # no token twice after it resumed


@BOTH_DEPTHS
@pytest.mark.parametrize("num_steps", range(2, 9))
def test_prompt_logprobs_survive_chunks_and_preemption(depth: int, num_steps: int) -> None:
    """Preempted anywhere: between chunks, with the first token in flight, after it."""
    driver = engine(num_blocks=20, depth=depth, max_num_batched_tokens=4)
    short = request("short", prompt(3), max_tokens=1)  # shifts the first chunks of the other
    new = request("new", prompt(20, 3), max_tokens=8, prompt_logprobs=1)
    driver.add(short)
    driver.add(new)
    for _ in range(num_steps):
        driver.step()
    state = driver.scheduler._state
    preempt(state, state.queues.running[-1])
    driver.scheduler.check_integrity()
    driver.run()
    assert driver.news["new"].num_preemptions == 1
    driver.check_done(new)


@BOTH_DEPTHS
def test_a_token_in_flight_is_kept_when_its_sequence_is_preempted(depth: int) -> None:
    driver = engine(num_blocks=6, depth=depth, max_num_seqs=2)
    old, new = request("old", prompt(8), max_tokens=12), request("new", prompt(3), max_tokens=8)
    driver.add(old)
    driver.step()
    driver.add(new)
    for _ in range(4):
        driver.step()
    num_read = len(driver.news["new"].token_ids)
    state = driver.scheduler._state
    assert preempt(state, state.queues.running[-1])
    driver.step()
    assert driver.scheduler.num_waiting == 1
    assert len(driver.news["new"].token_ids) == num_read + depth
    driver.run()
    driver.check_done(old)
    driver.check_done(new)


@BOTH_DEPTHS
def test_a_sequence_that_outgrows_the_pool_ends_alone(depth: int) -> None:
    driver = engine(num_blocks=4, block_size=4, depth=depth, max_num_seqs=2)
    batch = [
        request("big", prompt(6), max_tokens=100),
        request("fits", prompt(6), max_tokens=11),
        request("next", prompt(15), max_tokens=1),
    ]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    error = driver.news["big"].ends[0].error
    assert error is not None and "17 tokens" in error and "needs 5 blocks" in error
    assert "pool's 4" in error
    driver.check_idle()


def test_a_stop_in_flight_saves_a_sequence_that_fills_the_pool() -> None:
    driver = engine(num_blocks=2, block_size=4, depth=1)
    plain = request("a", prompt(2), max_tokens=7)
    tokens = expected(plain, driver.config, driver.cache).token_ids
    assert tokens[6] not in tokens[:6]
    driver.add(request("a", prompt(2), max_tokens=50, stop_token_ids=(tokens[6],)))
    driver.run()
    assert driver.news["a"].ends[0].finish_reason == "stop"
    assert driver.scheduler.peak_blocks_used == 2


def test_a_large_request_does_not_starve_small_ones() -> None:
    driver = engine(num_blocks=20, depth=1)
    driver.add(request("big", prompt(48), max_tokens=16))
    driver.step()
    small = [request(str(i), prompt(3, i), max_tokens=3) for i in range(5)]
    for entry in small:
        driver.add(entry)
    for _ in range(12):
        driver.step()
    assert all(driver.news[entry.request_id].ends for entry in small)
    assert not driver.news["big"].ends


@BOTH_DEPTHS
def test_many_requests_lose_no_block(depth: int) -> None:
    driver = engine(num_blocks=64, depth=depth, max_num_batched_tokens=32)
    batch = [
        request(str(i), prompt(1 + i * 7 % 40, i), eos=(0,), max_tokens=1 + i * 5 % 23)
        for i in range(120)
    ]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    driver.check_idle()
    counters = driver.scheduler.counters
    assert counters.generated_tokens == sum(len(n.token_ids) for n in driver.news.values())
    assert counters.prompt_tokens == sum(len(entry.prompt_token_ids) for entry in batch)
    assert 1 < counters.mean_running <= 64
    assert 0.5 < counters.slot_utilisation <= 1


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
def test_a_host_pool_too_small_for_any_group_is_no_deadlock(depth: int) -> None:
    driver = engine(num_blocks=10, depth=depth, num_swap_blocks=4, preemption="swap")
    batch = [request(str(i), prompt(10, i), max_tokens=20) for i in range(12)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    assert driver.scheduler.counters.preemptions_recompute


@pytest.mark.parametrize("costs", [CHEAP_TOKENS, DEAR_TOKENS])
def test_auto_takes_the_cheaper(costs: PreemptionCosts) -> None:
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
def test_a_group_goes_and_comes_back_whole(depth: int, mode: Mode, kind: str) -> None:
    driver = engine(num_blocks=16, depth=depth, num_swap_blocks=16, preemption=mode)
    old = request("old", prompt(8), max_tokens=40)
    group = beam_request("group", prompt(9, 3), 3, max_tokens=12)
    if kind == "samples":
        group = request("group", prompt(9, 3), n=3, temperature=1.0, max_tokens=12)
    driver.add(old)
    driver.add(group)
    driver.run()
    driver.check_done(old)
    driver.check_done(group)
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
    """Each ends exactly once, says what it says alone, and the first in rank is never preempted."""
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
