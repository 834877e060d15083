"""The engine: carries messages between the scheduler, the device and the text. Decides nothing.

The one thing it reports back is a stop string, which only text can show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from jaxpage.engine.requests import RequestFactory
from jaxpage.engine.stats import Stopwatch
from jaxpage.engine.tracking import LiveCompletion, LiveRequest
from jaxpage.errors import RequestError
from jaxpage.host.block_map import BlockMap
from jaxpage.host.plan import Request, SequenceUpdate, StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler
from jaxpage.outputs import EngineStats, RequestOutput
from jaxpage.sampling_params import BeamSearchParams, SamplingParams


class Device(Protocol):
    """What the engine asks of the device side; a Runner, or a stub in tests and simulations."""

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts a step. Where it raised, the same plan may come again."""
        ...

    def read(self, ticket: Any) -> StepResult:
        """Waits for a step; tickets come in the order they were given."""
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
        self._device = device
        self._scheduler = scheduler
        self._requests = requests
        self._depth = depth
        self._undispatched: StepPlan | None = None
        """A plan that dispatching failed for: the scheduler's books hold it as run."""
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._live: dict[str, LiveRequest] = {}
        self.block_history: list[BlockMap] | None = None
        """A list to keep the pool's map in, one a step; None, at first, keeps nothing."""
        self._stepping = Stopwatch()
        self._waiting = Stopwatch()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is still to finish."""
        return self._scheduler.has_unfinished or bool(self._live)

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
    ) -> None:
        """Submits a prompt (text or token ids); it joins at the next step.

        `priority`: lower runs first. `cache_salt`: only requests of the same salt share the blocks
        of prompts that they begin with.

        Raises RequestError for a wrong prompt or setting, CapacityError for a prompt that can
        never fit, ConfigError for a feature that is not there yet. Nothing else is touched.
        """
        request = self._requests.build(
            request_id,
            prompt,
            params or SamplingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        if request_id in self._live:  # also one that has ended and whose end is not told yet
            raise RequestError(
                f"got request id {request_id!r} again, wanted one that is not running; step until "
                "it has finished, or give another id"
            )
        self._scheduler.add(request)
        text = prompt if isinstance(prompt, str) else None
        count = request.params.num_sequences if request.beam is None else request.beam.beam_width
        completions = tuple(self._completion(request) for _ in range(count))
        self._live[request_id] = LiveRequest(request, text, completions)

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Runs one step; returns a snapshot of every request that has news.

        `only_finished`: of those that have finished with it, which is all that some callers want.
        One that was interrupted, while a program was compiled or a result waited for, is taken up
        where it was.
        """
        with self._stepping:
            self._read_back(at_least_one=False)  # what an interrupted step left unread
            plan = self._undispatched or self._scheduler.schedule()
            if plan is not None:
                self._undispatched = plan
                if self.block_history is not None:
                    self.block_history.append(self._scheduler.block_map())
                self._in_flight.append((plan, self._device.dispatch(plan)))
                self._undispatched = None
            self._read_back(at_least_one=plan is None)
            return self._publish(only_finished)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its last snapshot comes with the next step. False: unknown id."""
        return self._scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prompt: nothing computed so far is shared with what comes."""
        self._scheduler.reset_prefix_cache()

    def block_map(self) -> BlockMap:
        """Who owns which block of the pool now."""
        return self._scheduler.block_map()

    def stats(self, *, num_compilations: int = 0) -> EngineStats:
        """The counters so far."""
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

    def _completion(self, request: Request) -> LiveCompletion:
        return LiveCompletion(self._requests.detokenizer(request))

    def _read_back(self, *, at_least_one: bool) -> None:
        """Reads steps until at most `depth` are in flight."""
        while self._in_flight and (at_least_one or len(self._in_flight) > self._depth):
            plan, ticket = self._in_flight[0]
            with self._waiting:
                result = self._device.read(ticket)
            self._in_flight.popleft()
            self._scheduler.update(plan, result)
            at_least_one = False

    def _publish(self, only_finished: bool) -> list[RequestOutput]:
        """Turns the scheduler's news into snapshots; a stop string found here makes more news."""
        now_s = time.monotonic()
        changed: dict[str, LiveRequest] = {}
        while updates := self._scheduler.take_updates():
            for update in updates:
                live = self._live.get(update.request_id)
                if live is not None:
                    changed[update.request_id] = live
                    self._extend(live, update, now_s)
        outputs: list[RequestOutput] = []
        for request_id, live in changed.items():
            is_finished = live.is_finished
            if is_finished or not only_finished:
                outputs.append(live.snapshot(now_s))
            if is_finished:
                del self._live[request_id]
        return outputs

    def _extend(self, live: LiveRequest, update: SequenceUpdate, now_s: float) -> None:
        stop = live.extend(update, now_s)
        if stop is not None and update.finish_reason is None:
            self._scheduler.finish(update.seq_id, "stop", stop)
