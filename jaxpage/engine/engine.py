"""The engine: carries messages between the scheduler, the device and the text. Decides nothing.

The one thing it reports back is a stop string, which only text can show.

The tokens that requests have been given are the truth, and all that is needed to go on. When
anything is raised in the middle of the work, the next call drops the scheduler's state and the
steps in flight, and goes on from those tokens:

    told        "a": b c d      "e": f g         kept, with the updates not taken in yet
    state       queues, tables, cached prefixes  new: every request is prefilled again
    in flight   steps 7 and 8                    dropped: the same tokens are drawn again
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Protocol

from jaxpage.engine.faults import Retried, StepFault, Whole
from jaxpage.engine.leaving import new_exit_lock
from jaxpage.engine.requests import RequestFactory
from jaxpage.engine.tracking import LiveCompletion, LiveRequest, Told
from jaxpage.errors import RequestError
from jaxpage.host.plan import Request, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler
from jaxpage.outputs import BlockMap, EngineStats, RequestOutput, Update
from jaxpage.reading import answering
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

_MEND_TOKENIZER = "mend the tokenizer or set detokenize=False"


class Device(Protocol):
    """What the engine asks of the device side; a Runner, or a stub in tests and simulations."""

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step. After an error the same plan may come again.

        Raises StepFault when this plan can't be run but others can, or when the pool was lost.
        """
        ...

    def read(self, ticket: Any) -> StepResult:
        """Waits for a step; tickets come in the order they were given. Raises StepFault too."""
        ...


class LLMEngine:
    """Continuous batching, one step at a time. Belongs to one thread.

    `depth` is how many steps may be dispatched ahead of the one being read: 1 hides the host's
    work under the device's, 0 reads every step before the next is planned.
    """

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        requests: RequestFactory,
        *,
        depth: int = 1,
    ) -> None:
        self.device = device
        self._scheduler = scheduler
        self.requests = requests
        self._depth = depth
        self._undispatched: StepPlan | None = None
        """A plan that was not dispatched; the scheduler's state counts it as run."""
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._changed: dict[str, LiveRequest] = {}
        """Requests with news that no step has returned yet."""
        self._told: dict[str, tuple[Told, ...]] = {}
        """How much of each request `updates` has returned."""
        self.exit_lock = new_exit_lock()
        """Held while foreign code (device, tokenizer) may run: the process ends when it is free."""
        self._whole = Whole()
        self._retried = Retried(self._whole)
        self.block_history: list[BlockMap] | None = None
        """A list to keep the pool's map in, one a step; None, at first, keeps nothing."""
        self._stepping = _Stopwatch()
        self._waiting = _Stopwatch()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is still to finish."""
        if self._live or self._changed:
            return True
        return not self._whole.is_broken and self._scheduler.has_unfinished

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that are not finished."""
        return sum(len(live.request.prompt_token_ids) for live in self._live.values())

    def add_request(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: int = 0,
    ) -> None:
        """Submits a prompt (text or token ids); it joins at the next step.

        `priority`: lower runs first. `cache_salt`: only requests of the same salt share the blocks
        of prompts that they begin with. `adapter`: which of the engine's adapters its rows have,
        0 for none; requests of different ones share no blocks.

        Raises RequestError for a wrong prompt or setting, CapacityError for a prompt that can
        never fit, ConfigError for a feature that is not there yet. Nothing else is touched.
        """
        with self.exit_lock:
            request = self.requests.build(
                request_id,
                prompt,
                params or SamplingParams(),
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
            )
            self._add(request, prompt if isinstance(prompt, str) else None)

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Runs one step; returns a snapshot of every request that has news.

        `only_finished`: only of the requests that this step has finished.
        A step interrupted while a program is compiled or a result is awaited goes on where it was;
        after any other interrupt or error, every request goes on from the tokens it has. A request
        that can't be run fails alone, with `error` set; an error of no request's is raised.
        """
        with self.exit_lock, self._stepping:
            self._run_step()
            outputs = self._snapshots(only_finished)
        self._changed = {}
        return outputs

    def updates(self) -> list[Update]:
        """As `step`, but returns only what is new: each token once, not all so far every time.

        Read a request by `step` or by this, not by both.
        """
        with self.exit_lock, self._stepping:
            self._run_step()
            news: list[Update] = []
            told = dict(self._told)
            for request_id, live in self._changed.items():
                fresh, after = live.updates(told.get(request_id, ()))
                news += fresh
                told[request_id] = after
                if live.is_finished:
                    self._live.pop(request_id, None)
                    del told[request_id]
        self._told, self._changed = told, {}
        return news

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its last snapshot comes with the next step. False: unknown id."""
        self._rebuild_if_broken()
        with self._whole:
            return self._scheduler.abort(request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets requests, without an output. Runs nothing, waits for nothing; may be repeated.

        The others go on. With the last one the steps in flight are forgotten too.
        """
        needs_new_state, self._whole.is_broken = self._whole.is_broken, True
        for request_id in request_ids:
            self._changed.pop(request_id, None)
            self._told.pop(request_id, None)
            if self._live.pop(request_id, None) is not None and not needs_new_state:
                self._scheduler.drop(request_id)
        if not self._live and not needs_new_state:
            needs_new_state = self._unsent is not None  # the old counts it as run
            self._undispatched = None
            self._in_flight.clear()
            self._scheduler.drop_unread()
            self._scheduler.news.clear()
        self._whole.is_broken = needs_new_state
        self._rebuild_if_broken()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prompt: nothing computed so far is shared with what comes."""
        self._rebuild_if_broken()
        with self._whole:
            self._scheduler.reset_prefix_cache()

    def block_map(self) -> BlockMap:
        """Which sequences have which blocks of the pool now."""
        self._rebuild_if_broken()
        return self._scheduler.block_map()

    def stats(self, *, num_compilations: int = 0) -> EngineStats:
        """The counters so far."""
        self._rebuild_if_broken()
        scheduler, host = self._scheduler, self._scheduler.counters
        seconds = self._stepping.seconds
        return EngineStats(
            num_steps=host.num_steps,
            prompt_tokens=host.prompt_tokens,
            generated_tokens=host.generated_tokens,
            seconds=seconds,
            tokens_per_second=host.generated_tokens / seconds if seconds else 0.0,
            blocks_total=scheduler.blocks_total,
            blocks_free=scheduler.blocks_free,
            peak_blocks_used=scheduler.peak_blocks_used,
            mean_running=host.mean_running,
            slot_utilisation=host.slot_utilisation,
            blocks_saved_by_sharing=scheduler.peak_blocks_saved,
            preemptions_recompute=host.preemptions_recompute,
            preemptions_swap=host.preemptions_swap,
            swapped_out_blocks=host.swapped_out_blocks,
            prefix_hit_tokens=host.prefix_hit_tokens,
            num_compilations=num_compilations,
            host_seconds=seconds - self._waiting.seconds,
            device_wait_seconds=self._waiting.seconds,
        )

    def _add(self, request: Request, text: str | None) -> None:
        request_id = request.request_id
        self._rebuild_if_broken()
        # also a request that has ended, until its end is returned
        if request_id in self._live or request_id in self._changed:
            raise RequestError(
                f"got request id {request_id!r} again, wanted one that is not running; step until "
                "it has finished, or give another id"
            )
        self._scheduler.check(request)
        new_detokenizer = partial(self.requests.detokenizer, request)
        completions = tuple(LiveCompletion(new_detokenizer) for _ in range(request.num_sequences))
        live = LiveRequest(request, text, completions)
        with self._whole:
            self._scheduler.add(request)
            self._live[request_id] = live

    @property
    def _unsent(self) -> StepPlan | None:
        """The plan that is made and not in flight: dispatching it was interrupted."""
        if self._in_flight and self._in_flight[-1][0] is self._undispatched:
            return None
        return self._undispatched

    def _advance(self) -> None:
        """Dispatches a step and reads back what is more than `depth` behind it."""
        plan = self._undispatched = self._unsent
        self._read_back(at_least_one=False)  # what an interrupted step left unread
        if plan is None:
            with self._whole:
                plan = self._undispatched = self._scheduler.schedule()
                if plan is not None and self.block_history is not None:
                    self.block_history.append(self._scheduler.block_map())
        if plan is not None:
            with self._retried:
                self._in_flight.append((plan, self.device.dispatch(plan)))
            self._undispatched = None
        self._read_back(at_least_one=plan is None)

    def _read_back(self, *, at_least_one: bool) -> None:
        """Reads steps until at most `depth` are in flight."""
        while self._in_flight and (at_least_one or len(self._in_flight) > self._depth):
            plan, ticket = self._in_flight[0]
            with self._waiting, self._retried:
                result = self.device.read(ticket)
            with self._whole:
                self._in_flight.popleft()
                self._scheduler.update(plan, result)
            at_least_one = False

    def _run_step(self) -> None:
        """Runs one step and takes its news in."""
        self._rebuild_if_broken()
        try:
            self._advance()
        except StepFault as fault:
            self._fail(fault)
        with self._whole:
            while self._scheduler.news:  # a stop string found in the text makes more
                for update, stop in self._take_news():
                    if stop is None:
                        self._scheduler.drop(update.request_id)
                    else:
                        self._scheduler.finish(update.seq_id, "stop", stop)

    def _snapshots(self, only_finished: bool) -> list[RequestOutput]:
        """What `step` returns."""
        now_s = time.monotonic()
        outputs: list[RequestOutput] = []
        for request_id, live in self._changed.items():
            is_finished = live.is_finished
            if is_finished or not only_finished:
                outputs.append(live.snapshot(now_s))
            if is_finished:
                self._live.pop(request_id, None)
        return outputs

    def _take_news(self) -> list[tuple[SequenceUpdate, str | None]]:
        """Takes all news in; returns the updates that end a text, each with its stop string.

        None in place of a stop string: the tokenizer failed. An update stays in the scheduler's
        news until it is taken in; after an interrupt it may be taken in a second time.
        """
        news = self._scheduler.news
        ended: list[tuple[SequenceUpdate, str | None]] = []
        while news:
            try:
                with answering(
                    "a tokenizer that failed", wanted="text for the ids drawn", do=_MEND_TOKENIZER
                ):
                    self._extend_all(news, ended)
            except RequestError as error:
                update = news[0]
                live = self._live.get(update.request_id)
                if live is not None:
                    live.error = str(error)
                    self._changed[update.request_id] = live
                ended.append((update, None))
                news.popleft()
        return ended

    def _extend_all(
        self, news: deque[SequenceUpdate], ended: list[tuple[SequenceUpdate, str | None]]
    ) -> None:
        now_s, live_of, changed = time.monotonic(), self._live, self._changed
        while news:
            update = news[0]
            live = live_of.get(update.request_id)
            if live is not None:
                changed[update.request_id] = live
                stop = live.extend(update, now_s)
                if stop is not None and update.finish_reason is None:
                    ended.append((update, stop))
            news.popleft()

    def _fail(self, fault: StepFault) -> None:
        """Ends the requests that can't be run; the others are prefilled again."""
        self._whole.is_broken = True
        for request_id in self._scheduler.request_ids(fault.seq_ids):
            live = self._live[request_id]
            live.error = str(fault)
            self._changed[request_id] = live
        self._rebuild_if_broken()

    def _rebuild_if_broken(self) -> None:
        """Builds the scheduler's state anew when a change to it was broken off."""
        if not self._whole.is_broken:
            return
        self._in_flight.clear()
        self._undispatched = None
        self._take_news()  # a request that has ended needs no place in the new state
        going_on = [live.resumed() for live in self._live.values() if not live.is_finished]
        self._scheduler.restart(going_on)
        self._whole.is_broken = False


class _Stopwatch:
    """Adds up the wall time, in seconds, of the `with` blocks it is given to, one at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start
