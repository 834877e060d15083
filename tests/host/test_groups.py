"""Samples and beams of one request: one prefill, shared blocks, an end each."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage.host import Request
from jaxpage.outputs import TokenLogprob
from tests.host.driver import BOTH_DEPTHS, Driver, engine, prompt, shape
from tests.host.fake import beam_request, request


def samples(name: str, num_prompt: int, n: int, **params: Any) -> Request:
    return request(name, prompt(num_prompt), n=n, temperature=1.0, **params)


@BOTH_DEPTHS
def test_one_prefill_then_a_row_a_sample(depth: int) -> None:
    driver = engine(depth=depth)
    entry = samples("a", 6, 4, max_tokens=8, logprobs=1)
    driver.add(entry)
    driver.run()
    driver.check_done(entry)
    first, second = driver.plans[:2]
    assert shape(first) == [(1, 0, 6)]
    assert [(draw.seq_id, draw.sample_index) for draw in first.draws] == [
        (1, 0), (2, 1), (3, 2), (4, 3)
    ]  # fmt: skip
    assert shape(second) == [(i, 6, 1) for i in (1, 2, 3, 4)]
    if depth:
        assert [row.source for row in second.rows] == [0, 1, 2, 3]
    outputs = [tuple(said.token_ids) for said in driver.news["a"].samples]
    assert len(set(outputs)) > 1 and all(len(output) == 8 for output in outputs)
    driver.check_idle()


def test_the_last_block_is_copied_only_when_written() -> None:
    driver = engine(depth=0)
    driver.add(samples("a", 6, 3, max_tokens=4))
    driver.step()
    assert driver.scheduler.blocks_total - driver.scheduler.blocks_free == 2  # shared by three
    driver.step()
    assert len(driver.plans[1].moves.copies) == 2  # the last one writes in place
    assert driver.scheduler.peak_blocks_used == 4
    driver.run()
    assert not any(plan.moves for plan in driver.plans[2:])


def test_a_full_last_block_needs_no_copy() -> None:
    driver = engine(depth=0)
    driver.add(samples("a", 8, 3, max_tokens=4))
    driver.run()
    assert not any(plan.moves for plan in driver.plans)
    assert driver.scheduler.peak_blocks_used == 2 + 3
    assert driver.scheduler.peak_blocks_saved == 4


@BOTH_DEPTHS
def test_one_sample_stops_and_the_others_go_on(depth: int) -> None:
    driver = engine(depth=depth)
    entry = samples("a", 5, 3, max_tokens=12)
    driver.add(entry)
    for _ in range(4):
        driver.step()
    driver.scheduler.finish(2, "stop", "###")
    driver.run()
    (end,) = driver.news["a"].samples[1].ends
    assert end.stop_reason == "###"
    for index in (0, 2):
        driver.check_sample(entry, index, driver.news["a"].samples[index])
    driver.check_idle()


@BOTH_DEPTHS
@pytest.mark.parametrize("kind", ["samples", "beams"])
@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_of_a_group_gives_all_blocks_back(depth: int, kind: str, num_steps: int) -> None:
    driver = engine(num_blocks=40, depth=depth, max_num_batched_tokens=8)
    other = request("other", prompt(5, 3), max_tokens=30)
    driver.add(other)
    made = samples("a", 20, 4) if kind == "samples" else beam_request("a", prompt(20), 4)
    driver.add(made)
    for _ in range(num_steps):
        driver.step()
    assert driver.scheduler.abort("a")
    driver.scheduler.check_integrity()
    driver.step()
    assert driver.scheduler.num_running == 1
    assert driver.scheduler.blocks_total - driver.scheduler.blocks_free <= 4
    driver.run()
    assert [said.ends[0].finish_reason for said in driver.news["a"].samples] == ["abort"] * 4
    driver.check_done(other)
    driver.check_idle()


@BOTH_DEPTHS
def test_admission_counts_sequences(depth: int) -> None:
    driver = engine(depth=depth, max_num_seqs=5)
    batch = [samples(str(i), 4 + i, 3, max_tokens=6) for i in range(3)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) <= 5
    for entry in batch:
        driver.check_done(entry)


@BOTH_DEPTHS
def test_scoring_a_prompt_for_several_samples(depth: int) -> None:
    driver = engine(depth=depth, max_num_batched_tokens=4, enable_prefix_caching=True)
    entry = samples("a", 11, 3, max_tokens=0, prompt_logprobs=0)
    driver.add(entry)
    driver.run()
    driver.check_done(entry)
    assert isinstance(driver.news["a"].prompt_logprobs, tuple)
    assert isinstance(driver.news["a"].prompt_logprobs[1], TokenLogprob)


@BOTH_DEPTHS
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_sixteen_samples_in_a_small_pool(depth: int, mode: str) -> None:
    """Without swap blocks all fall back to recompute; never a fault of the whole engine."""
    driver = engine(num_blocks=20, depth=depth, preemption=mode)  # pyright: ignore[reportArgumentType]  # of the two
    batch = [samples("n", 6, 16, max_tokens=4), request("b", prompt(9), max_tokens=9)]
    for entry in batch:
        driver.add(entry)
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    assert driver.news["n"].error is None
    driver.check_idle()


def test_a_group_that_outgrows_the_pool_alone_ends_with_the_sum() -> None:
    driver = engine(num_blocks=6)
    driver.add(samples("a", 8, 3, max_tokens=60))
    other = request("b", prompt(5), max_tokens=5)
    driver.add(other)
    driver.run()
    error = driver.news["a"].error
    assert error is not None and "3 sequences" in error and "pool's 6" in error
    driver.check_done(other)
    driver.check_idle()


@BOTH_DEPTHS
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1.0, 2.0])
def test_beams_take_one_pass_a_token(depth: int, alpha: float) -> None:
    driver = engine(num_blocks=200, depth=depth)
    entry = beam_request(
        "a", prompt(9), 4, max_tokens=64, length_penalty=alpha, early_stopping="never"
    )
    driver.add(entry)
    driver.run()
    driver.check_done(entry)
    assert len(driver.plans) == 64  # forward passes, not 4 x 64
    assert driver.scheduler.peak_blocks_used < 4 * driver.cache.blocks_for(9 + 63)


def beam_news(driver: Driver, name: str) -> list[tuple[tuple[int, ...], float | None]]:
    return [(tuple(s.token_ids), s.ends[0].score) for s in driver.news[name].samples]


@BOTH_DEPTHS
def test_a_beam_says_the_same_alone_and_beside_others(depth: int) -> None:
    entry = beam_request("beam", prompt(7), 2, max_tokens=12, eos=(0, 1))
    found = []
    for others in ((), ("x", "y", "z")):
        driver = engine(num_blocks=60, depth=depth)
        for index, name in enumerate(others):
            driver.add(request(name, prompt(4 + index, index), max_tokens=20))
        driver.add(entry)
        driver.run()
        driver.check_done(entry)
        found.append(beam_news(driver, "beam"))
    assert found[0] == found[1]


def test_others_run_while_beams_wait_for_their_choice() -> None:
    driver = engine(depth=1)
    driver.add(beam_request("beam", prompt(4), 2, max_tokens=10))
    driver.add(request("a", prompt(4, 5), max_tokens=20))
    for _ in range(8):
        driver.step()
    assert all(any(row.seq_id == 3 for row in plan.rows) for plan in driver.plans)
    beams = [sum(row.seq_id in (1, 2) for row in plan.rows) for plan in driver.plans]
    assert beams == [1, 0, 2, 0, 2, 0, 2, 0]
