"""A difference of two timings is a figure or an error: noise never makes it negative."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.timing import TRIES, Disturbed, longer_less_shorter
from benchmarks.gpu import transformers
from benchmarks.gpu.kernels import Sizes
from benchmarks.speed import sharing
from benchmarks.speed.jobs import Job, measure, rate_lines
from benchmarks.speed.workers import protocol

CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module's clock is CLOCK."""
    monkeypatch.setattr("time.perf_counter", lambda: CLOCK.now)


class Runs:
    """Time that passes as told: so many seconds for each run."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.count = iter(seconds), 0

    def __call__(self, num_tokens: int) -> None:
        self.count += 1
        CLOCK.now += next(self.seconds)


@pytest.mark.parametrize(
    ("seconds", "wanted", "count"),
    [
        ((1.0, 3.0, 1.25), 2.0, 3),
        ((4.0, 3.0, 1.0, 1.0, 3.0, 1.0), 2.0, 6),  # the first was disturbed
        ((1.0, 3.0, 3.5, 1.0, 3.0, 1.0), 2.0, 6),
    ],
)
def test_a_run_that_was_disturbed_is_run_again(
    seconds: tuple[float, ...], wanted: float, count: int
) -> None:
    runs = Runs(*seconds)
    assert longer_less_shorter(runs, 64) == wanted
    assert runs.count == count


def test_a_rate_is_never_negative() -> None:
    runs = Runs(*(2.0, 1.0, 2.0) * TRIES)
    with pytest.raises(Disturbed, match=r"got 1\.00 s for 65 tokens and 2\.00 s for one, 3 times"):
        longer_less_shorter(runs, 64)


class Engine:
    """Steps take no time, or less: what a clock that is set back shows."""

    about = "a stand-in"

    def __init__(self, stream_s: float) -> None:
        self.stream_s = stream_s

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None: ...

    def prefill(self, prompt: list[int]) -> None: ...

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return self.stream_s


class Seat:
    """An engine at the table, in this process."""

    about, peak_bytes = "a stand-in", 0

    def __init__(self, name: str, *stream_s: float) -> None:
        self.name, self.stream_s = name, iter(stream_s)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        return protocol.run(Engine(next(self.stream_s)), request)

    def close(self) -> None: ...


STREAM = Job("stream", {"job": "stream", "prompt": [1], "new_tokens": 64}, 64)


@pytest.mark.parametrize("seconds", [0.0, -0.14])
def test_a_worker_gives_no_figure_of_no_time(seconds: float) -> None:
    with pytest.raises(Disturbed, match=r"for 64 tokens, wanted more than none; run it while"):
        protocol.run(Engine(seconds), STREAM.request)


def test_a_table_says_what_was_not_measurable_and_what_to_do() -> None:
    seats = [Seat("ours", 1.0, 2.0, 2.0), Seat("peer", 1.0, 4.0, -0.14), Seat("other", 1, 4, 4)]
    record = measure([*seats], [STREAM], rounds=2)
    assert record["tokens_per_second"] == {"stream": {"ours": [32, 32], "other": [16, 16]}}
    lines = rate_lines(record)
    assert "| stream | ours | 32.00 (32.00 to 32.00) |  |" in lines
    assert "| stream | other | 16.00 (16.00 to 16.00) | 2.00 (2.00 to 2.00) |" in lines
    assert "| stream | peer | not measurable |  |" in lines
    assert "run it while nothing else runs" in lines[-1]


def test_a_table_without_our_figure_has_no_ratio() -> None:
    record = measure([Seat("ours", -1.0), Seat("peer", 1.0, 4.0)], [STREAM], rounds=1)
    assert "| stream | peer | 16.00 (16.00 to 16.00) |  |" in rate_lines(record)


class Noisy:
    """An LLM whose single tokens take longer than its many: the machine is busy."""

    def generate(self, prompts: list[list[int]], params: Any, **_: Any) -> list[Any]:
        CLOCK.now += 2.0 if params.max_tokens == 1 else 1.0
        output = SimpleNamespace(token_ids=(1,) * params.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


def test_shared_decode_gives_no_rate_of_a_disturbed_run() -> None:
    llms: Any = {"on": Noisy(), "off": Noisy()}
    (name, why), *more = sharing.on_and_off(llms, [[1], [2]], 8, rounds=1).items()
    assert name == "not measurable" and not more
    assert why.startswith("got 1.00 s for 9 tokens and 2.00 s for one")


def test_generate_on_a_card_gives_no_time_of_a_disturbed_run() -> None:
    def generate(*, max_new_tokens: int, **_: Any) -> Any:
        CLOCK.now += 2.0 if max_new_tokens == 1 else 1.0
        return SimpleNamespace(cpu=lambda: None)

    torch = SimpleNamespace(ones=lambda *_, **__: 1, ones_like=lambda _: 1, int64=None)
    model = SimpleNamespace(generate=generate, device=None)
    with pytest.raises(Disturbed, match="run it while nothing else runs"):
        transformers._seconds(torch, model, 2, 32, Sizes.quick())
