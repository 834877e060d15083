"""`LLM`: a model, a pool and an engine behind a few calls."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.config import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig
from jaxpage.device.ops import Adapters
from jaxpage.device.placement import Placement
from jaxpage.engine.build import build
from jaxpage.engine.engine import LLMEngine
from jaxpage.engine.options import EngineOptions
from jaxpage.engine.programs import Report
from jaxpage.engine.requests import (
    Message,
    Params,
    Prompt,
    Score,
    as_params,
    as_prompts,
    in_order,
)
from jaxpage.engine.runner import Runner
from jaxpage.engine.sampling_inputs import STAGES, Stage
from jaxpage.errors import CapacityError, ConfigError, RequestError
from jaxpage.outputs import BlockMap, EngineStats, RequestOutput
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import ChatPrompt
from jaxpage.unsupported import check_available, comes_later


class Call:
    """One call of the LLM that is in progress: the ids of its requests and its generator."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self._steps: weakref.ref[Generator[RequestOutput, None, None]] | None = None

    def started(
        self, steps: Generator[RequestOutput, None, None]
    ) -> Generator[RequestOutput, None, None]:
        """The generator itself; the call is over when it is."""
        self._steps = weakref.ref(steps)
        return steps

    @property
    def is_over(self) -> bool:
        """Whether the generator will never run again, even if its clean-up was cut off."""
        steps = None if self._steps is None else self._steps()
        return steps is None or inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


class LLM:
    """Generates text with a paged, continuously batched engine.

    Give a model by name or path, or `config` and `params` that you have. `tokenizer`, whatever
    `as_tokenizer` takes, replaces the model's; beside `params` without one, prompts are token ids.
    The other keywords are those of `build`, and the options of the command line: see
    `EngineOptions`. Raises ConfigError, CapacityError or CheckpointError. Belongs to one thread.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        config: ModelConfig | None = None,
        params: dict[str, Any] | None = None,
        tokenizer: object | None = None,
        placement: Placement | None = None,
        stages: tuple[Stage, ...] = STAGES,
        adapters: Adapters | None = None,
        report: Report | None = None,
        **options: Any,
    ) -> None:
        if "kv_dtype" in options:
            raise comes_later("kv_dtype", "the model's dtype")
        unknown = sorted(set(options) - {field.name for field in fields(EngineOptions)})
        if unknown:
            raise ConfigError(
                f"got the option {unknown[0]!r}, wanted one of LLM's; check the spelling"
            )
        self._engine = build(
            EngineOptions(**options),
            model=model,
            config=config,
            params=params,
            tokenizer=tokenizer,
            placement=placement,
            stages=stages,
            adapters=adapters,
            report=report,
        )
        assert isinstance(self._engine.device, Runner), self._engine.device
        self.runner = self._engine.device
        self.config: ModelConfig = self.runner.config
        self.engine_config: EngineConfig = self.runner.limits
        self.cache_config: CacheConfig = self.runner.cache_config
        self.tokenizer = self._engine.requests.tokenizer
        self._next_id = 0
        self._call: Call | None = None

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Params | Seq[Params] | None = None,
        *,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Completes one prompt or many (text or token ids); outputs in input order.

        A request that fails comes back with `error` set; `raise_on_error` raises it instead.
        """
        return in_order(self.generate_iter(prompts, sampling_params, raise_on_error=raise_on_error))

    def generate_iter(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Params | Seq[Params] | None = None,
        *,
        raise_on_error: bool = False,
    ) -> Generator[RequestOutput, None, None]:
        """As `generate`, but yields each finished output as soon as it is there.

        Closing the generator aborts what is unfinished. `request_id` tells the order of input.
        """
        call = Call()
        items = partial(as_prompts, prompts)
        return call.started(self._complete(call, items, sampling_params, raise_on_error))

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yields the request so far after every step; its text only ever grows.

        Closing the generator aborts the request.
        """
        call = Call()
        return call.started(self._stream(call, prompt, sampling_params))

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: Params | Seq[Params] | None = None,
        *,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Completes one conversation or many through the model's chat template, as `generate`."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt | RequestError] = []
        for conversation in many:
            try:
                prompts.append(self.chat_prompt(conversation))  # type: ignore[arg-type]  # told apart above
            except RequestError as error:
                prompts.append(error)
        call = Call()
        steps = self._complete(call, lambda: prompts, sampling_params, raise_on_error)
        return in_order(call.started(steps))

    @property
    def engine(self) -> LLMEngine:
        """The engine under the calls; free for other use while none of them runs."""
        self._drop_leftovers()
        return self._engine

    def stats(self) -> EngineStats:
        """The engine's counters so far."""
        self._drop_leftovers()
        return self._engine.stats(num_compilations=len(self.runner.programs))

    def update_params(self, params: dict[str, Any]) -> None:
        """New weights of the same shapes, without a recompile; refused while requests run.

        The prefix cache was computed with the old weights, so it is dropped.
        """
        self._check_idle()
        self._engine.reset_prefix_cache()  # first: with new weights, old prefixes are wrong
        self.runner.update_params(params)

    def score(self, prompt: Prompt, completion: Prompt) -> Score:
        """How likely the completion is after the prompt, token by token; nothing is generated.

        Text is tokenised apart from the prompt's. Raises RequestError or CapacityError.
        """
        ids = self._engine.requests.encode_completion(completion)
        whole = (*self._engine.requests.encode(prompt), *ids)
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        output = self.generate([whole], params, raise_on_error=True)[0]
        assert output.prompt_logprobs is not None, output
        entries = tuple(entry for entry in output.prompt_logprobs[-len(ids) :] if entry is not None)
        return Score(sum(entry.logprob for entry in entries), entries)

    def block_map(self) -> BlockMap:
        """The blocks of each sequence now; `engine.block_history` keeps a map of each step."""
        self._drop_leftovers()
        return self._engine.block_map()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prompt; requests that run go on."""
        self._drop_leftovers()
        self._engine.reset_prefix_cache()

    def expect_requests(self, num_requests: int) -> None:
        """Starts compiling what that many waiting requests will need first."""
        if num_requests:
            tokens = self._engine.waiting_tokens
            with self._engine.exit_lock:
                self.runner.expect(num_requests=num_requests, prompt_tokens=tokens)

    def close(self) -> None:
        """Frees the pool and the programs; the LLM can't be used afterwards."""
        self.runner.close()

    def chat_prompt(self, messages: Seq[Message]) -> ChatPrompt:
        """The whole prompt that the model's chat template makes of a conversation, with its special
        tokens: encoding adds none. As part of another string it becomes plain text."""
        if self.tokenizer is None:
            raise RequestError("got messages and no tokenizer, wanted one; pass a tokenizer")
        from jaxpage.chat_template import render_chat

        return render_chat(messages, self.tokenizer)

    def _drop_leftovers(self) -> None:
        """Forgets the requests of a call that was cut off before it could drop them."""
        call = self._call
        if call is not None and call.is_over:
            self._leave(call)

    def _leave(self, call: Call) -> None:
        """Drops a call's unfinished requests; may be done again.

        Runs nothing and waits for nothing, so whatever ended the call can't stop this.
        """
        self._engine.drop(call.request_ids)
        if self._call is call:
            self._call = None

    def _check_idle(self) -> None:
        self.runner.check_open()
        self._drop_leftovers()
        if self._engine.has_unfinished:
            raise ConfigError(
                "got a new call while requests run, wanted an idle engine; finish or close the "
                "last call, or use llm.engine.add_request and step"
            )

    def _stream(
        self, call: Call, prompt: Prompt, sampling_params: Params | None
    ) -> Generator[RequestOutput, None, None]:
        self._check_idle()
        self._call = call
        try:
            call.request_ids.append(self._take_id())
            self._engine.add_request(call.request_ids[0], prompt, sampling_params)
            self.expect_requests(1)
            yield from self._steps()
        finally:
            self._leave(call)

    def _complete(
        self,
        call: Call,
        prompts: Callable[[], Seq[Prompt | RequestError]],
        sampling_params: Params | Seq[Params] | None,
        raise_on_error: bool,
    ) -> Generator[RequestOutput, None, None]:
        """Yields each request once it has finished or failed; an error stands for a bad prompt."""
        self._check_idle()
        items = prompts()
        params = as_params(sampling_params, len(items))
        for each in params:  # a feature of a later version is refused before anything runs
            check_available(each)
        failed: list[RequestOutput] = []
        self._call = call
        try:
            for prompt, each in zip(items, params, strict=True):
                request_id = self._take_id()
                try:
                    if isinstance(prompt, RequestError):
                        raise prompt
                    call.request_ids.append(request_id)
                    self._engine.add_request(request_id, prompt, each)
                except (RequestError, CapacityError) as error:
                    if raise_on_error:
                        raise
                    failed.append(RequestOutput.refused(request_id, prompt, str(error)))
            yield from failed
            self.expect_requests(len(items) - len(failed))
            for output in self._steps(only_finished=True):
                if raise_on_error and output.error is not None:
                    raise RequestError(output.error)
                yield output
        finally:
            self._leave(call)

    def _steps(self, *, only_finished: bool = False) -> Iterator[RequestOutput]:
        while self._engine.has_unfinished:
            yield from self._engine.step(only_finished=only_finished)

    def _take_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)
