"""Updates tell what is new alone, and added up they are the snapshots of `step`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jaxpage.engine.tracking import LiveRequest
from jaxpage.outputs import RequestOutput, Update
from jaxpage.sampling_params import BeamSearchParams
from tests.engine.fakes import StubEngine, run


@dataclass
class Sum:
    """A completion, added up from its updates."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    last: Update | None = None


def told(engine: StubEngine) -> tuple[list[Update], dict[tuple[str, int], Sum]]:
    """All updates until nothing is left, and their sums."""
    updates: list[Update] = []
    sums: dict[tuple[str, int], Sum] = {}
    while engine.has_unfinished:
        for update in engine.updates():
            updates.append(update)
            whole = sums.setdefault((update.request_id, update.index), Sum())
            whole.token_ids += update.token_ids
            whole.text += update.text
            whole.last = update
    return updates, sums


def add_all(engine: StubEngine) -> None:
    engine.add("plain", "abc")
    engine.add("samples", "abd", n=3, temperature=1.0)
    engine.add("best", "abe", n=2, best_of=4, temperature=1.0)
    engine.add("long", "bcd", max_tokens=30)
    text = {each.request_id: each for each in run_alone("stopped", "bbc")}["stopped"]
    engine.add("stopped", "bbc", stop=(text.outputs[0].text[3:5],))
    engine.add_request("beams", "bca", BeamSearchParams(beam_width=2, max_tokens=5))
    engine.device.fake.add(engine._live["beams"].request)


def run_alone(name: str, prompt: str) -> list[RequestOutput]:
    engine = StubEngine()
    engine.add(name, prompt)
    return run(engine)[name]


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_updates_added_up_are_the_last_snapshots(num_blocks: int) -> None:
    by_step, by_update = StubEngine(num_blocks=num_blocks), StubEngine(num_blocks=num_blocks)
    add_all(by_step)
    add_all(by_update)
    want = {name: outputs[-1] for name, outputs in run(by_step).items()}
    updates, sums = told(by_update)
    assert {update.request_id for update in updates} == want.keys()
    for name, output in want.items():
        own = {index: whole for (of, index), whole in sums.items() if of == name}
        assert len(own) == len(output.outputs), name
        for completion in output.outputs:
            whole = own[completion.index]
            assert whole.token_ids == completion.token_ids and whole.text == completion.text, name
            assert whole.last is not None
            assert whole.last.finish_reason == completion.finish_reason
            assert whole.last.stop_reason == completion.stop_reason
            assert whole.last.cumulative_logprob == completion.cumulative_logprob
            assert whole.last.score == completion.score
    for name in want:
        assert [u.finished for u in updates if u.request_id == name][:-1].count(True) == 0
        assert [u for u in updates if u.request_id == name][-1].finished


def test_a_token_is_told_once_however_long_the_text_is() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=40)
    updates, _ = told(engine)
    assert max(len(update.token_ids) for update in updates) == 1
    assert sum(len(update.token_ids) for update in updates) == 40


def test_an_abort_and_a_failure_are_told() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=40)
    engine.add("b", "abd", max_tokens=40)
    for _ in range(3):
        engine.updates()
    assert engine.abort("a")
    engine._live["b"].error = "got a fault"
    engine._changed["b"] = engine._live["b"]
    ended = {u.request_id: u for u in engine.updates() if u.finished}
    assert ended["a"].finish_reason == "abort" and ended["a"].error is None
    assert ended["b"].error == "got a fault" and not ended["b"].token_ids
    assert not engine._told


def test_a_dropped_request_may_come_again_under_its_id() -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    for _ in range(4):
        engine.updates()
    engine.drop(["a"])
    engine.add("a", "abc")
    _, sums = told(engine)
    assert sums["a", 0].token_ids == run_alone("a", "abc")[-1].outputs[0].token_ids


def test_what_an_interrupted_call_did_not_return_comes_with_the_next() -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    engine.add("b", "abd")
    whole: dict[str, tuple[int, ...]] = {}
    calls = 0
    while engine.has_unfinished:
        calls += 1
        with pytest.MonkeyPatch.context() as patch:
            if calls % 3 == 0:
                patch.setattr(LiveRequest, "updates", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.updates()
                continue
            for update in engine.updates():
                whole[update.request_id] = whole.get(update.request_id, ()) + update.token_ids
    for name, prompt in (("a", "abc"), ("b", "abd")):
        assert whole[name] == run_alone(name, prompt)[-1].outputs[0].token_ids


def interrupted(live: LiveRequest, told: object) -> None:
    raise KeyboardInterrupt
