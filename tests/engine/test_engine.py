"""The engine's step over a stub device: overlap, text, stops, aborts, faults kept apart."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxpage.errors import CapacityError, ConfigError, RequestError
from jaxpage.sampling_params import SamplingParams
from tests.engine.fakes import LETTERS, StubEngine, run, said


def test_an_id_is_free_again_only_when_its_end_has_been_told() -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    assert engine.abort("a")
    with pytest.raises(RequestError, match="got request id 'a' again"):
        engine.add("a", "abc")
    assert run(engine)["a"][-1].outputs[0].finish_reason == "abort"
    engine.add("a", "abc")
    assert run(engine)["a"][-1].outputs[0].text == said("abc", 12)


@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_the_models_at_any_depth(depth: int) -> None:
    engine = StubEngine(depth=depth)
    for prompt in ("abc", "hello", "q"):
        engine.add(prompt, prompt)
    news = run(engine)
    assert {name: news[name][-1].outputs[0].text for name in news} == {
        prompt: said(prompt, 12) for prompt in ("abc", "hello", "q")
    }


def test_the_next_step_is_dispatched_before_the_last_is_read() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=3)
    run(engine)
    assert engine.device.log == [
        "dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3",
    ]  # fmt: skip
    assert engine.device.most_in_flight == 2


def test_a_request_that_ends_by_length_gets_no_surplus_step() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=5)
    run(engine)
    assert engine.stats().num_steps == 5


def test_snapshots_only_grow_and_end_once() -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    snapshots = run(engine)["a"]
    texts = [snapshot.outputs[0].text for snapshot in snapshots]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [snapshot.finished for snapshot in snapshots] == [False] * 11 + [True]
    assert [s.outputs[0].finish_reason for s in snapshots] == [None] * 11 + ["length"]


def test_only_what_has_finished_is_told_where_no_more_is_wanted() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=3)
    engine.add("b", "hello")
    engine.add("c", "q")
    assert engine.step(only_finished=True) == []
    assert engine.abort("c")
    told: list[list[str]] = []
    while engine.has_unfinished:
        told.append([output.request_id for output in engine.step(only_finished=True)])
    assert [ids for ids in told if ids] == [["c"], ["a"], ["b"]]


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    answer = said("abc", 12)
    stop = answer[4:7]
    engine = StubEngine()
    engine.add("a", "abc", stop=stop)
    snapshots = run(engine)["a"]
    last = snapshots[-1].outputs[0]
    end = answer.index(stop)
    assert (last.text, last.finish_reason, last.stop_reason) == (answer[:end], "stop", stop)
    assert len(last.token_ids) == end + 3
    assert all(answer[:end].startswith(s.outputs[0].text) for s in snapshots)


def test_a_stop_string_completed_by_the_last_token_allowed_wins_over_length() -> None:
    answer = said("abc", 7)
    engine = StubEngine()
    engine.add("a", "abc", stop=answer[4:7], max_tokens=7)
    last = run(engine)["a"][-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", answer[4:7])


def test_a_held_back_tail_is_shown_when_the_text_ends() -> None:
    answer = said("abc", 12)
    engine = StubEngine()
    engine.add("a", "abc", stop=answer[-1] + "§")
    assert run(engine)["a"][-1].outputs[0].text == answer


def test_the_end_tokens_text_is_left_out_unless_asked_for() -> None:
    answer = said("abc", 12)
    end = LETTERS.index(answer[5])
    for include in (False, True):
        engine = StubEngine()
        engine.add("a", "abc", stop_token_ids=[end], include_stop_str_in_output=include)
        last = run(engine)["a"][-1].outputs[0]
        size = answer.index(answer[5]) + 1
        assert last.text == answer[: size if include else size - 1]
        assert (len(last.token_ids), last.stop_reason) == (size, end)


def test_logprobs_come_one_a_token_and_add_up() -> None:
    engine = StubEngine()
    engine.add("a", "abc", logprobs=1, prompt_logprobs=0)
    output = run(engine)["a"][-1]
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    raw = sum(2 * entry.logprob for entry in completion.logprobs)  # the fake halves them
    assert completion.cumulative_logprob == pytest.approx(raw)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3


def test_no_text_is_made_when_none_is_wanted() -> None:
    engine = StubEngine()
    engine.add("a", "abc", detokenize=False)
    last = run(engine)["a"][-1].outputs[0]
    assert (last.text, len(last.token_ids)) == ("", 12)


def test_abort_ends_with_one_last_snapshot_and_gives_the_blocks_back() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=100)
    engine.add("b", "bcd")
    for _ in range(4):
        engine.step()
    assert engine.abort("a") and not engine.abort("nobody")
    news = run(engine)
    assert [s.outputs[0].finish_reason for s in news["a"] if s.finished] == ["abort"]
    assert news["b"][-1].outputs[0].text == said("bcd", 12)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total


@pytest.mark.parametrize("where", ["dispatch", "read"])
def test_an_interrupted_step_is_taken_up_again(where: str) -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    engine.step()
    whole = getattr(engine.device, where)

    def interrupted(_: object) -> None:
        setattr(engine.device, where, whole)
        raise KeyboardInterrupt

    setattr(engine.device, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = [output for _ in range(20) for output in engine.step()]
    assert outputs[-1].outputs[0].text == said("abc", 12)
    assert not engine.has_unfinished


def test_preempted_requests_say_the_same_and_tell_it() -> None:
    engine = StubEngine(num_blocks=8)
    prompts = ["abc", "bcdef", "cdefgh", "defg"]
    for prompt in prompts:
        engine.add(prompt, prompt, max_tokens=16)
    news = run(engine)
    assert engine.stats().preemptions_recompute > 0
    for prompt in prompts:
        assert news[prompt][-1].outputs[0].text == said(prompt, 16)
    metrics = [snapshots[-1].metrics for snapshots in news.values()]
    told = sum(metric.preemptions for metric in metrics if metric is not None)
    assert told == engine.stats().preemptions_recompute


def test_one_that_outgrows_the_pool_fails_alone() -> None:
    engine = StubEngine(num_blocks=4)
    engine.add("small", "ab", max_tokens=4)
    engine.add("big", "abc", max_tokens=100)
    news = run(engine)
    assert news["small"][-1].outputs[0].text == said("ab", 4)
    assert news["big"][-1].error is not None and news["big"][-1].outputs == ()
    assert news["big"][-1].finished


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, RequestError),
        ([], {}, RequestError),
        ([1, -1], {}, RequestError),
        ([1, 24], {}, RequestError),
        ([1, 1.5], {}, RequestError),
        ([1, True], {}, RequestError),
        ("a" * 300, {}, RequestError),
        ("a", {"stop_token_ids": [10**6]}, RequestError),
        ("a", {"logit_bias": {24: 1.0}}, RequestError),
        ("a", {"allowed_token_ids": [24]}, RequestError),
        ("a", {"logits_processors": [print]}, ConfigError),
    ],
)
def test_a_wrong_request_is_refused_and_hurts_nobody(
    prompt: str | list[int], params: dict[str, object], error: type[Exception]
) -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    with pytest.raises(error, match=r"got .*(wanted|comes with a later version)"):
        engine.add("wrong", prompt, **params)
    assert run(engine)["a"][-1].outputs[0].text == said("abc", 12)


def test_requests_carry_priority_and_salt() -> None:
    engine = StubEngine()
    engine.add_request("a", "abc", cache_salt="mine", priority=2)
    request = engine._live["a"].request
    assert (request.namespace, request.priority) == ((("salt", "mine"),), 2)


def test_the_map_of_every_step_is_kept_where_asked() -> None:
    engine = StubEngine(num_blocks=8)
    engine.block_history = []
    engine.add("a", "abcdefgh", max_tokens=3)
    run(engine)
    assert len(engine.block_history) == 3
    owned = [sum(b.kind == "owned" for b in entry.blocks) for entry in engine.block_history]
    assert owned[0] == 2 and len(engine.block_history[0].blocks) == 8


def test_a_prompt_that_no_pool_block_can_hold_is_refused_with_the_sum() -> None:
    with pytest.raises(CapacityError, match="blocks"):
        StubEngine(num_blocks=2).add("a", "abcdefghij")


def test_unseeded_requests_have_streams_of_their_own_and_seeds_shift_nobody() -> None:
    def seeds(first: int | None) -> list[int]:
        engine = StubEngine()
        engine.add_request("a", "abc", SamplingParams(seed=first))
        engine.add_request("b", "abc", SamplingParams())
        return [engine._live[name].request.seed for name in "ab"]

    with_seed, without = seeds(7), seeds(None)
    assert with_seed[0] == 7 and without[0] != 7
    assert with_seed[1] == without[1] and without[0] != without[1]
