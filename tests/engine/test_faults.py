"""Whatever is raised out of a step, an LLM is as good as new; a request's fault is its own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM, ConfigError, SamplingParams, load
from jaxpage.engine.engine import LLMEngine
from jaxpage.engine.runner import Runner
from jaxpage.engine.swap import HostPool
from jaxpage.host.plan import Resumed, StepPlan
from tests.engine.fakes import LetterStream, StubEngine, run, said
from tests.engine.injection import Attack, Bench, Injection, conditions, random_attack
from tests.tiny import MODEL_DIR

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "block_size": 4, "num_blocks": 32, "max_num_seqs": 4, "max_model_len": 64,
    "max_num_batched_tokens": 32, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    config, params, tokenizer = load(str(MODEL_DIR), dtype="float32")
    return {"config": config, "params": params, "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def llm(parts: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(**parts, **LIMITS)
    yield llm
    llm.close()


def ids(llm: LLM, prompt: str = "Tom has") -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY, raise_on_error=True)[0].outputs[0].token_ids


def fail(times: int, error: Callable[[], BaseException], *, after: bool = False) -> Any:
    """A wrapper that raises before or after the first so many calls of what it wraps."""
    left = [times]

    def wrap(whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if after or not left[0]:
                result = whole(*args)
                if not left[0]:
                    return result
            left[0] -= 1
            raise error()

        return run

    return wrap


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(**conditions()[1])
    yield bench
    bench.llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupt", [True, False], ids=["interrupts", "errors"])
def test_an_llm_is_as_good_as_new_whatever_was_raised_wherever(
    bench: Bench, is_interrupt: bool
) -> None:
    """A few of what `python -m benchmarks.checks.interrupts` tries by the thousand."""
    rng = random.Random(7)
    for _ in range(30):
        bench.attack(random_attack(bench, rng, is_interrupt=is_interrupt))
    bench.check_size()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed_stream", "engine"])
def test_a_second_interrupt_may_fall_anywhere_in_the_clean_up(bench: Bench, kind: str) -> None:
    at = bench.events[kind, True] * 2 // 3
    for again in range(1, 400, 25):
        bench.attack(Attack(kind, Injection(at, KeyboardInterrupt, True, again)))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("where", ["dispatch", "read", "_run"])
def test_a_step_that_raises_leaves_an_idle_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, times: int, error: type[BaseException]
) -> None:
    wanted = ids(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, where, fail(times, error)(getattr(llm.runner, where)))
        for _ in range(2 if times > 1 else 1):
            if where == "_run" and error is MemoryError:
                assert "memory" in str(llm.generate("Tom has", GREEDY)[0].error)
            else:
                with pytest.raises(error):
                    llm.generate("Tom has", GREEDY)
            assert not llm.engine.has_unfinished
    assert ids(llm) == wanted
    assert llm.stats().blocks_free == llm.stats().blocks_total


@pytest.mark.slow
def test_a_pool_that_was_taken_and_not_kept_is_made_anew(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by hand, where the running request goes on from the tokens it has."""
    wanted = ids(llm)
    get = llm.runner._forward_program
    lose = fail(1, KeyboardInterrupt, after=True)
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "_forward_program", lambda shape: lose(get(shape)))
        with pytest.raises(KeyboardInterrupt):
            ids(llm)
    assert llm.runner._pool.leaves[0].is_deleted()
    assert ids(llm) == wanted
    llm.engine.add_request("a", "Tom has", GREEDY)
    llm.engine.step()
    llm.engine.step()
    for leaf in llm.runner._pool.leaves:
        leaf.delete()
    outputs = [output for _ in range(12) for output in llm.engine.step()]
    assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == wanted


@pytest.mark.slow
def test_donated_params_are_named_and_new_ones_mend_it(parts: dict[str, Any]) -> None:
    params = jax.tree.map(jax.numpy.array, parts["params"])
    llm = LLM(**{**parts, "params": jax.device_put(params)}, **LIMITS)
    wanted = ids(llm)
    for leaf in llm.runner._weights:
        leaf.delete()
    for _ in range(2):
        with pytest.raises(ConfigError, match="donated or deleted since"):
            ids(llm)
    llm.update_params(parts["params"])
    assert ids(llm) == wanted
    llm.close()
    for call in (lambda: ids(llm), lambda: llm.expect_requests(1)):
        with pytest.raises(ConfigError, match="after close"):
            call()


def test_a_report_that_raises_is_told_and_costs_no_program(parts: dict[str, Any]) -> None:
    names: list[str] = []

    def report(name: str, seconds: float) -> None:
        names.append(name)
        raise OSError("closed file")

    llm = LLM(**parts, **LIMITS, report=report)
    for _ in range(20):
        try:
            assert len(ids(llm)) == 6
            break
        except OSError:
            assert not llm.engine.has_unfinished
    assert len(names) == len(set(names)) > 1
    llm.close()


def test_a_program_that_could_not_be_compiled_is_tried_anew(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = llm.runner._lower_forward
    llm.runner.programs._compiled.clear()
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "_lower_forward", fail(10**9, RuntimeError)(lower))
        for _ in range(2):
            with pytest.raises(RuntimeError):
                ids(llm)
    assert len(ids(llm)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"temperature": 0.5}, {"n": 2, "temperature": 0.5}])
def test_a_request_whose_draw_no_array_holds_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    wanted = ids(llm)
    monkeypatch.setattr(llm._engine.requests, "_eos_token_ids", frozenset({2**31}))
    bad = replace(GREEDY, min_tokens=2, **asked)
    outputs = llm.generate(["Tom has", "Tom has", "The"], [GREEDY, bad, GREEDY])
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "settings that no step can hold" in str(outputs[1].error)
    assert outputs[0].outputs[0].token_ids == wanted


def test_memory_that_runs_out_on_the_device_fails_the_steps_requests_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ids(llm)
    error = lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB")  # noqa: E731
    monkeypatch.setattr(jax, "device_get", fail(1, error)(jax.device_get))
    outputs = llm.generate(["Tom has"] * 6, GREEDY)
    failed = [output.error for output in outputs if output.error is not None]
    assert 0 < len(failed) <= LIMITS["max_num_seqs"] and "RESOURCE_EXHAUSTED" in failed[0]
    assert {o.outputs[0].token_ids for o in outputs if o.error is None} == {wanted}


@jax.transfer_guard("allow")
def broken(array: jax.Array) -> jax.Array:
    """As a device fails: the array is there at once, and whoever waits for it gets an error."""
    large = jax.numpy.ones((1500, 1500))
    late = jax.jit(lambda array, large: array + (large @ large @ large)[0, 0].astype(array.dtype))
    return jax.jit(_failing)(late(array, large))  # what waits for another is not run at once


def _failing(array: jax.Array) -> jax.Array:
    def fails(array: Any) -> Any:
        raise RuntimeError("the device is broken")

    return jax.pure_callback(fails, jax.typeof(array), array)


@pytest.fixture
def calm() -> Iterator[None]:
    """At its exit JAX waits for the last callback, and would tell what that raised."""
    yield
    like = jax.ShapeDtypeStruct((1,), np.float32)
    jax.jit(lambda: jax.pure_callback(lambda: np.zeros(1, np.float32), like))()


@pytest.mark.slow
@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("what", ["draws", "pool"])
def test_what_a_device_left_that_failed_once_fails_no_later_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    wanted = ids(llm)
    runner, whole = llm.runner, llm.runner._run
    steps: list[StepPlan] = []

    def run(plan: StepPlan) -> Any:
        ticket = whole(plan)
        steps.append(plan)
        if len(steps) != 3:
            return ticket
        if what == "pool":
            runner._pool = runner._pool._replace(leaves=[*map(broken, runner._pool.leaves)])
        latest = broken(ticket.latest)
        return replace(ticket, drawn=latest, latest=latest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run", run)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the device is broken"):
            ids(llm)
    for _ in range(2):
        assert ids(llm) == wanted


@pytest.mark.usefixtures("calm")
def test_blocks_that_never_arrive_at_the_host_are_forgotten() -> None:
    pool = HostPool(1, (2,), np.dtype("float32"))
    pool.store([0], broken(jax.device_put(np.zeros((1, 2), np.float32))))
    out = np.zeros((1, 2), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError):
        pool.load([0], out)
    pool.forget()
    pool.load([0], out)


def test_a_call_that_is_cut_off_in_its_clean_up_is_cleared_away_by_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ids(llm)
    stream = llm.stream("Tom has", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "drop", fail(1, KeyboardInterrupt)(llm._engine.drop))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert llm._engine.has_unfinished and not llm.engine.has_unfinished
    assert ids(llm) == wanted


def test_a_closed_stream_neither_runs_nor_waits_and_keeps_what_is_cached(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ids(llm, "Tom has a red ball")
    stream = llm.stream("Anna", GREEDY)
    next(stream)
    next(stream)
    with monkeypatch.context() as patch:
        for name in ("dispatch", "read"):
            patch.setattr(llm.runner, name, fail(10**9, AssertionError)(None))  # pyright: ignore[reportArgumentType]  # never called
        stream.close()
    output = llm.generate("Tom has a red ball", GREEDY)[0]
    assert output.num_cached_tokens and output.outputs[0].token_ids == wanted


def test_requests_by_hand_go_on_beside_a_call_that_is_closed(llm: LLM) -> None:
    wanted = ids(llm)
    stream = llm.stream("Anna", GREEDY)
    next(stream)
    llm.engine.add_request("mine", "Tom has", GREEDY)
    stream.close()
    outputs = [output for _ in range(12) for output in llm.engine.step()]
    assert outputs[-1].request_id == "mine" and outputs[-1].outputs[0].token_ids == wanted


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_tokenizer_that_raises_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    engine.add("b", "hello", detokenize=False)
    monkeypatch.setattr(LetterStream, "push", fail(times, KeyError)(LetterStream.push))
    news = run(engine)
    assert "got a tokenizer that failed (KeyError" in str(news["a"][-1].error)
    assert news["a"][-1].finished
    assert len(news["b"][-1].outputs[0].token_ids) == 12
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_what_fails_before_any_text_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    engine.add("b", "hello")
    broken = fail(1, KeyError)(LLMEngine._extend_all)
    monkeypatch.setattr(LLMEngine, "_extend_all", broken)
    news = run(engine)
    assert sorted(news) == ["a", "b"] and not engine.has_unfinished
    assert [bool(news[name][-1].error) for name in sorted(news)].count(True) == 1


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"stop": "§", "logprobs": 1}])
@pytest.mark.parametrize("step", range(4))
def test_everybody_goes_on_from_the_tokens_told_when_the_books_are_broken(
    params: dict[str, Any], step: int
) -> None:
    def outputs(*, breaks: bool) -> Any:
        engine = StubEngine(num_blocks=16)
        for name in ("abc", "bcd", "hello"):
            engine.add(name, name, max_tokens=8, **params)
        last: dict[str, Any] = {}
        for index in range(40):
            if breaks and index == step:
                engine._whole.is_broken = True
            last |= {output.request_id: output for output in engine.step()}
        assert not engine.has_unfinished
        engine.scheduler.check_integrity()
        return {name: output.outputs for name, output in last.items()}

    assert outputs(breaks=True) == outputs(breaks=False)


def test_an_update_that_was_broken_off_is_taken_in_once() -> None:
    """The stream of letters is interrupted after a token was noted, before its text was."""
    engine = StubEngine()
    engine.add("a", "abc", stop="§", logprobs=1)
    push = LetterStream.push
    for place in range(3, 9, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LetterStream, "push", fail(1, KeyboardInterrupt, after=True)(push))
            engine.step() if place == 3 else None
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    last = run(engine)["a"][-1].outputs[0]
    assert last.text == said("abc", 12) and len(last.logprobs or ()) == 12


def test_outputs_of_a_step_that_was_interrupted_come_with_the_next() -> None:
    engine = StubEngine()
    engine.add("a", "abc", max_tokens=1)
    snapshots = engine._snapshots

    def interrupted(only_finished: bool) -> Any:
        outputs = snapshots(only_finished)
        if outputs:
            engine._snapshots = snapshots
            raise KeyboardInterrupt
        return outputs

    engine._snapshots = interrupted
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished
    assert [output.finished for output in engine.step()] == [True]
    assert not engine.has_unfinished


def test_a_restarted_scheduler_may_be_restarted_again() -> None:
    engine = StubEngine()
    engine.add("a", "abc")
    engine.step()
    request = engine._live["a"].request
    told = Resumed(request, ((),), (False,), False)
    for _ in range(2):
        engine.scheduler.restart([told])
        engine.scheduler.check_integrity()
    plan = engine.scheduler.schedule()
    assert isinstance(plan, StepPlan) and [row.start for row in plan.rows] == [0]
    assert plan.rows[0].seq_id == 1


def test_a_plan_that_was_dispatched_is_not_dispatched_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may fall after the device has a step and before the engine knows."""
    wanted = ids(llm)
    dispatch, runner = Runner.dispatch, llm.runner
    calls: list[StepPlan] = []

    def interrupted(plan: StepPlan) -> Any:
        ticket = dispatch(runner, plan)
        calls.append(plan)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return ticket

    monkeypatch.setattr(runner, "dispatch", interrupted)
    llm.engine.add_request("a", "Tom has", GREEDY)
    last = None
    while llm.engine.has_unfinished:
        try:
            last = (llm.engine.step() or [last])[-1]
        except KeyboardInterrupt:
            continue
    assert last is not None and last.outputs[0].token_ids == wanted
    assert calls[::2] == calls[1::2]


@pytest.mark.slow
def test_a_process_ends_while_a_thread_of_it_runs_steps() -> None:
    """Where Python stops a thread within the device's library, the process aborts."""
    script = f"""
import threading
from jaxpage import LLM, SamplingParams
llm = LLM({str(MODEL_DIR)!r}, num_blocks=16, max_model_len=64, max_num_seqs=1)
params = SamplingParams(max_tokens=20, ignore_eos=True)
llm.generate("Tom", params)
def run():
    while True:
        llm.generate("Tom", params)
threading.Thread(target=run, daemon=True).start()
for _ in range(10):
    with llm._engine.exit_lock:
        pass
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
