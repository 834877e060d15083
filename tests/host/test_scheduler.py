"""What the scheduler promises, one scenario each; random operations are in test_random.py."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxpage.errors import RequestError
from jaxpage.host import Ladder
from tests.host.driver import BOTH_DEPTHS, engine, prompt, shape
from tests.host.fake import expected, request


def test_a_new_request_joins_at_the_next_step_and_a_finished_one_leaves_at_once() -> None:
    driver = engine(depth=0)
    driver.add(request("a", prompt(3), max_tokens=4))
    driver.step()
    driver.step()
    driver.add(request("b", prompt(5), max_tokens=2))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [
        [(1, 0, 3)],
        [(1, 3, 1)],
        [(1, 4, 1), (2, 0, 5)],
        [(1, 5, 1), (2, 5, 1)],
    ]


def test_the_token_in_flight_feeds_the_next_step() -> None:
    driver = engine(depth=1)
    driver.add(request("a", prompt(3), max_tokens=3))
    driver.add(request("b", prompt(2), max_tokens=3))
    driver.step()
    driver.step()
    assert [(row.token_ids, row.source) for row in driver.plans[1].rows] == [((), 0), ((), 1)]
    driver.add(request("c", prompt(2), max_tokens=3))
    driver.step()
    driver.step()
    assert [(row.token_ids, row.source) for row in driver.plans[2].rows] == [
        ((), 0),
        ((), 1),
        ((0, 1), None),
    ]
    assert [(row.token_ids, row.source) for row in driver.plans[3].rows] == [((), 2)]


@BOTH_DEPTHS
def test_no_surplus_step_where_the_end_is_certain(depth: int) -> None:
    for max_model_len, max_tokens in ((256, 5), (8, None)):
        driver = engine(depth=depth, max_model_len=max_model_len)
        driver.add(request("a", prompt(3), max_tokens=max_tokens))
        driver.run()
        assert len(driver.news["a"].token_ids) == 5
        assert len(driver.plans) == 5


@BOTH_DEPTHS
def test_a_stop_costs_one_surplus_step_at_depth_one(depth: int) -> None:
    driver = engine(depth=depth)
    plain = request("a", prompt(3), max_tokens=20)
    tokens = expected(plain, driver.config, driver.cache).token_ids
    end = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    stopped = request("a", prompt(3), max_tokens=20, stop_token_ids=(tokens[end],))
    driver.add(stopped)
    driver.run()
    driver.check_done(stopped)
    assert driver.news["a"].ends[0].stop_reason == tokens[end]
    assert len(driver.plans) == end + 1 + depth
    assert driver.scheduler.counters.generated_tokens == end + 1


@BOTH_DEPTHS
def test_blocks_are_taken_one_at_a_time(depth: int) -> None:
    """Held according to use, not to what is allowed."""
    for num_prompt, num_output in ((1, 1), (4, 1), (4, 2), (7, 10), (16, 33)):
        driver = engine(depth=depth)
        driver.add(request("a", prompt(num_prompt), max_tokens=num_output))
        driver.run()
        want = driver.cache.blocks_for(num_prompt + num_output - 1)  # the last is never stored
        assert driver.scheduler.peak_blocks_used == want
        lengths = [len(plan.rows[0].block_ids) for plan in driver.plans]
        assert all(b - a in (0, 1) for a, b in pairwise(lengths))


def test_a_stop_long_before_max_tokens_holds_few_blocks() -> None:
    driver = engine(num_blocks=64, block_size=1, depth=1)
    plain = request("a", prompt(3), max_tokens=200)
    tokens = expected(plain, driver.config, driver.cache).token_ids
    end = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    driver.add(request("a", prompt(3), max_tokens=200, stop_token_ids=(tokens[end],)))
    driver.run()
    assert driver.scheduler.peak_blocks_used == 3 + end + 1


def test_a_table_is_the_same_object_until_it_grows() -> None:
    driver = engine(block_size=4, depth=1)
    driver.add(request("a", prompt(4), max_tokens=9))
    driver.run()
    tables = [plan.rows[0].block_ids for plan in driver.plans]
    assert len({id(table) for table in tables}) == 3
    assert [len(table) for table in tables] == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_several_prompts_share_a_step_up_to_its_limits() -> None:
    driver = engine(max_num_batched_tokens=10, max_prefill_rows=3, max_num_seqs=4)
    for i, num_tokens in enumerate((2, 2, 2, 7, 3)):
        driver.add(request(str(i), prompt(num_tokens), max_tokens=2))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [
        [(1, 0, 2), (2, 0, 2), (3, 0, 2)],  # three rows
        [(1, 2, 1), (2, 2, 1), (3, 2, 1), (4, 0, 7)],  # four sequences, ten tokens
        [(4, 7, 1), (5, 0, 3)],
        [(5, 3, 1)],
    ]


def test_a_long_prompt_takes_several_steps() -> None:
    driver = engine(max_num_batched_tokens=8)
    driver.add(request("a", prompt(20), max_tokens=2))
    driver.add(request("b", prompt(5), max_tokens=2))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [
        [(1, 0, 8)],
        [(1, 8, 8)],
        [(1, 16, 4), (2, 0, 4)],
        [(1, 20, 1), (2, 4, 1)],
        [(2, 5, 1)],
    ]
    assert [len(plan.draws) for plan in driver.plans] == [0, 0, 1, 2, 1]


def test_a_prefill_step_is_cut_where_it_would_be_padding() -> None:
    driver = engine(prefill_ladder=Ladder((4, 8, 16, 32)), max_num_batched_tokens=32)
    driver.add(request("a", prompt(17), max_tokens=1))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [[(1, 0, 13)], [(1, 13, 4)]]
    driver = engine(prefill_ladder=Ladder((4, 8, 16, 32)), max_num_batched_tokens=32)
    for i, num_tokens in enumerate((14, 2, 3)):
        driver.add(request(str(i), prompt(num_tokens), max_tokens=1))
    driver.run()
    assert [shape(plan) for plan in driver.plans] == [
        [(2, 0, 1), (1, 0, 14)],
        [(2, 1, 1), (3, 0, 3)],
    ]


@BOTH_DEPTHS
def test_max_tokens_zero_scores_the_prompt(depth: int) -> None:
    driver = engine(depth=depth, max_num_batched_tokens=4)
    scored = request("scored", prompt(11), max_tokens=0, prompt_logprobs=2)
    one = request("one", prompt(1), max_tokens=0, prompt_logprobs=0)
    plain = request("plain", prompt(11), max_tokens=0)
    for entry in (scored, one, plain):
        driver.add(entry)
    assert driver.news["plain"].ends and driver.news["one"].ends  # at once: nothing to run
    driver.run()
    for entry in (scored, one, plain):
        driver.check_done(entry)
    assert driver.news["one"].prompt_logprobs == (None,)
    assert not any(plan.draws for plan in driver.plans)
    assert sum(plan.num_tokens for plan in driver.plans) == 10  # the last one predicts output
    driver.check_idle()


@BOTH_DEPTHS
@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_gives_the_blocks_back_within_one_step(depth: int, num_steps: int) -> None:
    driver = engine(num_blocks=16, depth=depth, max_num_batched_tokens=8)
    driver.add(request("a", prompt(20), max_tokens=20, prompt_logprobs=0))
    for _ in range(num_steps):
        driver.step()
    before = list(driver.news["a"].token_ids)
    assert driver.scheduler.abort("a")
    assert not driver.scheduler.abort("a")
    driver.scheduler.check_integrity()
    driver.step()
    driver.check_idle()
    assert driver.news["a"].token_ids == before
    assert [end.finish_reason for end in driver.news["a"].ends] == ["abort"]


@BOTH_DEPTHS
def test_the_engine_ends_a_sequence_at_a_stop_string(depth: int) -> None:
    driver = engine(depth=depth)
    driver.add(request("a", prompt(3), max_tokens=10))
    driver.add(request("b", prompt(4), max_tokens=10))
    while len(driver.news["a"].token_ids) < 4:
        driver.step()
    driver.scheduler.finish(1, "stop", "###")
    driver.scheduler.finish(1, "stop", "###")  # one that has ended stays as it is
    driver.run()
    (end,) = driver.news["a"].ends
    assert (end.finish_reason, end.stop_reason, end.new_token_ids) == ("stop", "###", ())
    assert len(driver.news["a"].token_ids) == 4
    driver.check_done(driver.device.requests[2])
    driver.check_idle()


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    driver = engine()
    first = request("a", prompt(3))
    driver.add(first)
    with pytest.raises(RequestError, match="'a' again"):
        driver.scheduler.check(first)
    driver.run()
    driver.check_done(first)
    driver.add(request("a", prompt(4)))
    driver.run()
    driver.check_idle()


def test_a_refused_request_hurts_no_other() -> None:
    driver = engine(max_model_len=16)
    good = request("good", prompt(5))
    driver.add(good)
    with pytest.raises(RequestError):
        driver.scheduler.check(request("bad", prompt(17)))
    driver.run()
    driver.check_done(good)


def test_nothing_to_do_is_no_plan() -> None:
    driver = engine()
    assert driver.scheduler.schedule() is None
    assert not driver.scheduler.has_unfinished


def test_a_third_plan_is_refused() -> None:
    driver = engine()
    driver.add(request("a", prompt(3)))
    assert driver.scheduler.schedule() and driver.scheduler.schedule()
    with pytest.raises(AssertionError, match="two plans are unread"):
        driver.scheduler.schedule()


def test_no_stream_stalls_behind_a_long_prompt() -> None:
    driver = engine(max_num_batched_tokens=8)
    driver.add(request("short", prompt(4), max_tokens=20))
    driver.step()
    driver.add(request("long", prompt(60), max_tokens=2))
    driver.run()
    first = [plan.rows[0].seq_id for plan in driver.plans[:20]]
    assert first == [1] * 20
    assert all(plan.num_tokens <= 8 for plan in driver.plans)
