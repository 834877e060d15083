"""Exceptions raised at any place of the engine's code, and what must hold of an LLM after each.

A run of a call is counted first, event by event; then it is run again and something is raised at
one of them. Python itself raises an interrupt between two instructions, so the events are those of
`sys.settrace`: lines, or single instructions. Raising there ends the tracing, so where more is to
come a profile function starts it again at the next call.
"""

from __future__ import annotations

import dis
import gc
import itertools
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import jax

import jaxpage
from jaxpage import LLM, BeamSearchParams, ModelConfig, RequestOutput, SamplingParams
from tests.tiny import MODEL_DIR

SOURCE = str(Path(jaxpage.__file__).parent)
Place = tuple[CodeType, int]


class Stop(Exception):
    """An error that no code of the engine knows."""


ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: Stop("injected"),
    lambda: RuntimeError("injected"),
    lambda: ValueError("injected"),
    lambda: KeyError("injected"),
    lambda: AssertionError("injected"),
    lambda: OSError("injected"),
    lambda: MemoryError("injected"),
    lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected"),
    lambda: jax.errors.JaxRuntimeError("INTERNAL: injected"),
)


@dataclass(frozen=True)
class Injection:
    """What is raised: at event number `at`, then as `again` says."""

    at: int
    make: Callable[[], BaseException] = KeyboardInterrupt
    by_instruction: bool = True
    again: int | Literal["always"] | None = None
    """None: never. always: at the same place whenever it is reached. n: once more, n events later,
    in what the first one set off."""


@dataclass(frozen=True)
class Attack:
    """A call of one kind, and what is raised in it."""

    kind: str
    injection: Injection

    @property
    def name(self) -> str:
        """What kind of attack it is, for counts."""
        is_interrupt = self.injection.make is KeyboardInterrupt
        again = self.injection.again
        how = "lasting" if again == "always" else "once" if again is None else "twice"
        return f"{'interrupt' if is_interrupt else 'error'} {how}"


class Injector:
    """Counts the events of the engine's code on this thread, and raises at one of them."""

    def __init__(self, injection: Injection) -> None:
        self.places: list[str] = []
        """Where something was raised."""
        self.count = 0
        self._injection = injection
        self._is_on = True
        self._place: Place | None = None
        self._next = injection.at

    def __enter__(self) -> Injector:
        if self._injection.by_instruction:  # Python 3.12 asks for it before tracing begins
            sys._getframe().f_trace_opcodes = True
        if self._injection.again is not None:
            sys.setprofile(self._go_on)
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        sys.setprofile(None)
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        if self._injection.by_instruction:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._event

    def _event(self, frame: FrameType, event: str, _: object) -> Any:
        if event not in ("line", "opcode") or not self._is_on or _is_unwinding(frame):
            return self._event
        self.count += 1
        if self.count == self._next or (
            self._place is not None and self._place == _place(frame, self._injection)
        ):
            self._raise(frame)
        return self._event

    def _raise(self, frame: FrameType) -> None:
        code, again = frame.f_code, self._injection.again
        if again == "always":
            self._place = _place(frame, self._injection)
            self._next = 0
        elif again is not None and not self.places:
            self._next = self.count + again
        self.places.append(f"{Path(code.co_filename).stem}:{code.co_qualname}:{frame.f_lineno}")
        raise self._injection.make()

    def _go_on(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and sys.gettrace() is None and len(self.places) < 1000:
            sys.settrace(self._enter_frame)
            caller: FrameType | None = frame
            while caller is not None:
                if caller.f_code.co_filename.startswith(SOURCE):
                    self._enter_frame(caller, event, None)
                    caller.f_trace = self._event
                caller = caller.f_back


UNWINDING = {
    dis.opmap[name]
    for name in ("PUSH_EXC_INFO", "POP_EXCEPT", "RERAISE", "CHECK_EXC_MATCH", "COPY", "SEND",
                 "WITH_EXCEPT_START", "CLEANUP_THROW", "RETURN_GENERATOR", "YIELD_VALUE")
    if name in dis.opmap
}  # fmt: skip
"""Where Python itself raises nothing: what is raised here stays on its stack of exceptions."""


def _is_unwinding(frame: FrameType) -> bool:
    return frame.f_code.co_code[frame.f_lasti] in UNWINDING


def _place(frame: FrameType, injection: Injection) -> Place:
    return frame.f_code, frame.f_lasti if injection.by_instruction else frame.f_lineno


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
DRAWN = replace(GREEDY, temperature=0.9, seed=3, logprobs=1, frequency_penalty=0.2)
STOPPED = replace(GREEDY, max_tokens=6, stop=("e",))
SCORED = replace(GREEDY, prompt_logprobs=0, max_tokens=2)
LONG = replace(GREEDY, max_tokens=9)
SAMPLES = replace(DRAWN, n=3)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4)
PROMPTS = ("Tom has a", "Tom has", "Anna", "2 +")
CHECKED: tuple[tuple[str, Any], ...] = (
    (PROMPTS[0], GREEDY), (PROMPTS[2], DRAWN), (PROMPTS[0], BEAMS), (PROMPTS[1], STOPPED),
)  # fmt: skip
TIGHT: dict[str, Any] = {
    "block_size": 2, "num_blocks": 12, "max_num_seqs": 4, "max_model_len": 64,
    "max_num_batched_tokens": 16, "seed": 0,
}  # fmt: skip
"""So few blocks that requests give way to each other."""
Said = dict[Any, Any]


def said(outputs: list[RequestOutput]) -> list[Any]:
    """What requests have come to: their errors, or the ids and texts of each completion."""
    return [
        "error" if output.error else tuple((o.token_ids, o.text) for o in output.outputs)
        for output in outputs
    ]


class Calls:
    """Calls of every kind on one LLM; each returns what was said, by name."""

    def __init__(self, llm: LLM, params: Any) -> None:
        self.llm = llm
        self._params = params
        self._names = itertools.count()

    def __call__(self, kind: str) -> Said:
        return getattr(self, kind)()

    def generate(self) -> Said:
        return dict(enumerate(said(self.llm.generate(list(PROMPTS), MIXED))))

    def pressed(self) -> Said:
        """Requests that outgrow the pool together, so that some give way."""
        return dict(enumerate(said(self.llm.generate(list(PROMPTS), LONG))))

    def samples(self) -> Said:
        return dict(enumerate(said(self.llm.generate(list(PROMPTS[:2]), [SAMPLES, GREEDY]))))

    def beams(self) -> Said:
        return dict(enumerate(said(self.llm.generate(list(PROMPTS[:2]), [BEAMS, DRAWN]))))

    def stream(self) -> Said:
        return {0: said(list(self.llm.stream(PROMPTS[0], DRAWN)))[-1]}

    def closed_stream(self) -> Said:
        steps = self.llm.stream(PROMPTS[0], GREEDY)
        next(steps)
        next(steps)
        steps.close()
        return {}

    def closed_iterator(self) -> Said:
        steps = self.llm.generate_iter(list(PROMPTS), MIXED)
        next(steps)
        steps.close()
        return {}

    def chat(self) -> Said:
        return {0: said(self.llm.chat([{"role": "user", "content": "Hi"}], GREEDY))[0]}

    def score(self) -> Said:
        return {0: round(self.llm.score("Tom has", " a red").logprob, 3)}

    def new_params(self) -> Said:
        self.llm.update_params(self._params)
        return self.stream()

    def engine(self) -> Said:
        """Requests added, stepped and aborted by hand, and taken up again after what is raised."""
        engine, told = self.llm._engine, {}
        names = {f"r{next(self._names)}": place for place in range(4)}
        aborted = ""
        raised: list[BaseException] = []
        for name, place in names.items():
            _tried(raised, lambda: engine.add_request(name, PROMPTS[place], MIXED[place]))  # noqa: B023  # called here
            _tried(raised, lambda: self._step(told))
            if place == 1:
                aborted = name
                _tried(raised, lambda: engine.abort(name))  # noqa: B023  # called here
        is_running = True
        while is_running and len(raised) < 8:
            _tried(raised, lambda: self._step(told))
            left: list[bool] = []
            _tried(raised, lambda: left.append(engine.has_unfinished))  # noqa: B023  # called here
            is_running = left != [False]
        if raised:
            raise Broken(raised, names, aborted, told)
        told.pop(aborted, None)
        return {names[name]: what for name, what in told.items()}

    def _step(self, told: Said) -> None:
        for output in self.llm._engine.step():
            if output.finished:
                told[output.request_id] = said([output])[0]


MIXED = [GREEDY, DRAWN, STOPPED, SCORED]
KINDS = ("generate", "pressed", "samples", "beams", "stream", "closed_stream", "closed_iterator",
         "chat", "score", "new_params", "engine")  # fmt: skip


def _outcome(error: BaseException, injection: Injection) -> str:
    """Whether a call raised what was injected, or what was made of it."""
    is_it = type(error) is type(injection.make())
    return "raised it" if is_it else f"raised {type(error).__name__}"


def conditions() -> tuple[dict[str, Any], ...]:
    """Options of the LLMs that are attacked: each way of giving way."""
    return ({"preemption": "recompute"}, {"preemption": "swap"})


def _one_layer(config: ModelConfig, params: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's first layer alone, which compiles sooner; what it says matters to nobody."""
    dropped = {f"layers_{index}" for index in range(1, config.num_layers)}
    kept = {name: leaf for name, leaf in params.items() if name not in dropped}
    return replace(config, num_layers=1), kept


class Broken(Exception):
    """What was raised while requests were run by hand, and how far these came."""

    def __init__(
        self, raised: list[BaseException], names: dict[str, int], aborted: str, told: Said
    ) -> None:
        super().__init__(repr(raised[0]))
        self.raised, self.names, self.aborted, self.told = raised, names, aborted, told


def _tried(raised: list[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # anything may have been injected
        raised.append(error)


class Bench:
    """An LLM under attack, and what a clean one says and counts."""

    def __init__(self, **options: Any) -> None:
        self._options = {**TIGHT, **options}
        config, params, self._tokenizer = jaxpage.load(MODEL_DIR, dtype="float32")
        self._config, self._params = _one_layer(config, params)
        self.build()
        self.events: dict[tuple[str, bool], int] = {}
        self.wanted: dict[str, Said] = {}
        for kind in KINDS:
            self.calls(kind)  # compiles
        for kind in KINDS:
            self.wanted[kind] = self.calls(kind)
            for by_instruction in (False, True):
                with Injector(Injection(0, by_instruction=by_instruction)) as injector:
                    assert self.calls(kind) == self.wanted[kind], kind
                self.events[kind, by_instruction] = injector.count
        stats = self.llm.stats()
        assert stats.preemptions_recompute + stats.preemptions_swap, "nobody gave way"
        assert stats.prefix_hit_tokens and stats.blocks_saved_by_sharing, stats
        self.checked = self._checked()
        self.rest()
        self.num_arrays = len(jax.live_arrays())
        self.num_threads = threading.active_count()

    def build(self) -> None:
        """A new LLM, as where the last one has been broken."""
        parts = {"config": self._config, "params": self._params, "tokenizer": self._tokenizer}
        self.llm = LLM(**parts, **self._options)
        self.calls = Calls(self.llm, self._params)

    def rest(self) -> None:
        """Lets go of what only the last step kept, so that arrays can be counted."""
        self.llm.generate(PROMPTS[0], GREEDY)
        gc.collect()  # exceptions and the frames they came from

    def attack(self, attack: Attack) -> tuple[list[str], str]:
        """(places, outcome) of one call; AssertionError for what must never be."""
        kind, injection = attack.kind, attack.injection
        injector = Injector(injection)
        outcome, told = "passed", None
        try:
            with injector:
                told = self.calls(kind)
        except Broken as broken:
            outcome = _outcome(broken.raised[0], injection)
            self._finish(broken, injection)
        except BaseException as error:
            if not injector.places:
                raise
            outcome = _outcome(error, injection)
        self.check()
        if told is not None:
            outcome = self._compare(kind, told, is_error=injection.make is not KeyboardInterrupt)
        return injector.places, outcome

    def check(self) -> None:
        """That the LLM is as good as new."""
        engine = self.llm.engine
        stats = self.llm.stats()
        assert not engine.has_unfinished, "requests run"
        assert stats.blocks_free == stats.blocks_total, stats
        engine._scheduler.check_integrity()
        blocks = engine._scheduler._state.blocks
        host = blocks._host
        assert host.num_free == host.num_blocks and not blocks._tables
        assert not (engine._live or engine._in_flight or engine._changed)
        assert self._checked() == self.checked, "other ids than before"
        assert self.llm.stats().blocks_free == stats.blocks_total

    def check_size(self) -> None:
        """That nothing has grown: arrays of the device, threads."""
        self.rest()
        num_arrays = len(jax.live_arrays())
        assert num_arrays <= self.num_arrays + 8, (num_arrays, self.num_arrays)
        assert threading.active_count() <= self.num_threads, threading.enumerate()

    def _checked(self) -> list[Any]:
        prompts, params = zip(*CHECKED, strict=True)
        return said(self.llm.generate(list(prompts), list(params), raise_on_error=True))

    def _finish(self, broken: Broken, injection: Injection) -> None:
        """Runs what was run by hand to its end: nobody is lost, and nobody says anything else."""
        for _ in range(200):
            if not self.llm.engine.has_unfinished:
                break
            self.calls._step(broken.told)
        wanted = self.wanted["engine"]
        refused = 0
        for name, place in broken.names.items():
            if name not in broken.told:
                refused += 1  # what was raised by add_request, or as the step returned
            elif name != broken.aborted and broken.told[name] != wanted[place]:
                is_error = injection.make is not KeyboardInterrupt
                assert is_error and broken.told[name] == "error", (place, broken.told[name])
        assert refused <= len(broken.raised), (broken.told, broken.raised)

    def _compare(self, kind: str, told: Said, *, is_error: bool) -> str:
        if told == self.wanted[kind]:
            return "passed"
        assert is_error, (told, self.wanted[kind])
        for name, what in told.items():
            assert what in ("error", self.wanted[kind][name]), (name, what)
        return "failed alone"


def draw_injection(
    rng: random.Random, num_events: int, *, by_instruction: bool, is_interrupt: bool
) -> Injection:
    """A random one: an interrupt, a third of them twice; or an error, half of them lasting."""
    at = rng.randint(1, num_events)
    if is_interrupt:
        again = int(rng.expovariate(1 / 60)) + 1 if rng.random() < 1 / 3 else None
        return Injection(at, KeyboardInterrupt, by_instruction, again)
    return Injection(at, rng.choice(ERRORS), by_instruction, rng.choice((None, "always")))


def random_attack(bench: Bench, rng: random.Random, *, is_interrupt: bool) -> Attack:
    """One attack on a call of any kind, at any place."""
    kind, by_instruction = rng.choice(KINDS), rng.random() < 0.6
    injection = draw_injection(
        rng,
        bench.events[kind, by_instruction],
        by_instruction=by_instruction,
        is_interrupt=is_interrupt,
    )
    return Attack(kind, injection)
