"""What the engine remembers of a live request: its text so far, its times, its completions.

The caller gets it as snapshots, each of which extends the one before, or as updates: only what is
new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpage.engine.detokenize import Detokenizer
from jaxpage.host.plan import Request, Resumed, SequenceUpdate
from jaxpage.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
    Update,
)


class Told(NamedTuple):
    """How much of a completion the updates so far have returned."""

    num_tokens: int = 0
    num_characters: int = 0
    has_ended: bool = False


@dataclass
class LiveCompletion:
    """One completion being made."""

    new_detokenizer: Callable[[], Detokenizer | None]
    """Makes the detokenizer; None: the request asked for no text."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    before: tuple[SequenceUpdate | None, int, float] = (None, 0, 0.0)
    """The last update, and the tokens and their sum before it, so that it can be undone."""

    def __post_init__(self) -> None:
        self.detokenizer = self.new_detokenizer()

    def extend(self, update: SequenceUpdate, *, shows_end: bool) -> str | None:
        """Takes an update in; returns the stop string that its text completes, if any.

        An update that was broken off may come again. After the end nothing is taken in.
        """
        if self.before[0] is update:
            self._rewind()
        elif self.finish_reason is not None:
            return None
        self.before = (update, len(self.token_ids), self.cumulative_logprob)
        self.token_ids += update.new_token_ids
        self.logprobs += update.logprobs
        self.cumulative_logprob += update.raw_logprob_sum
        self.score = update.score
        found = None if self.detokenizer is None else self._extend_text(update, shows_end)
        if found is not None:
            self.stop_reason, self.finish_reason = found, "stop"
        elif update.finish_reason is not None:
            self.stop_reason, self.finish_reason = update.stop_reason, update.finish_reason
        return found

    def _extend_text(self, update: SequenceUpdate, shows_end: bool) -> str | None:
        assert self.detokenizer is not None
        shown = update.new_token_ids
        if update.finish_reason == "stop" and not shows_end:
            shown = shown[:-1]  # the end token has no text
        found = self.detokenizer.append(shown) if shown else None
        if found is not None or update.finish_reason is not None:
            found = self.detokenizer.finish()  # the last tokens may complete a stop string too
        return found

    def _rewind(self) -> None:
        """Undoes the last update, even half done; the completion had not ended before it."""
        _, num_tokens, self.cumulative_logprob = self.before
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]
        self.finish_reason = self.stop_reason = None
        self.detokenizer = self.new_detokenizer()
        if self.detokenizer is not None:
            self.detokenizer.append(self.token_ids)

    @property
    def text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.text

    @property
    def told(self) -> Told:
        """The mark that says that everything so far has been returned."""
        return Told(len(self.token_ids), len(self.text), self.finish_reason is not None)

    def update(self, request_id: str, index: int, told: Told, *, with_logprobs: bool) -> Update:
        """What is new since `told`."""
        return Update(
            request_id=request_id,
            index=index,
            token_ids=tuple(self.token_ids[told.num_tokens :]),
            text=self.text[told.num_characters :],
            logprobs=tuple(self.logprobs[told.num_tokens :]) if with_logprobs else (),
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            score=self.score,
        )

    def snapshot(self, index: int, *, with_logprobs: bool) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=tuple(self.logprobs) if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            score=self.score,
        )


@dataclass
class LiveRequest:
    """One request being run."""

    request: Request
    prompt: str | None
    completions: tuple[LiveCompletion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        ended = [completion.finish_reason is not None for completion in self.completions]
        # the hypotheses of a beam search come all at once, in the order of their scores
        is_ended = all(ended) if self.request.beam is None else any(ended)
        return self.error is not None or is_ended

    @property
    def shown(self) -> tuple[LiveCompletion, ...]:
        """The completions of a snapshot; with best_of > n, none before the choice is made."""
        params, done = self.request.params, self.completions
        if self.error is not None:
            return ()
        if self.request.beam is not None:
            return tuple(each for each in done if each.finish_reason is not None)
        if params.num_sequences == params.n:
            return done
        ranked = sorted(done, key=lambda each: -each.cumulative_logprob)  # stable
        return tuple(ranked[: params.n]) if self.is_finished else ()

    def extend(self, update: SequenceUpdate, now_s: float) -> str | None:
        """Takes an update in; returns the stop string that its text completes, if any."""
        self.error = update.error or self.error
        self.num_preemptions = max(self.num_preemptions, update.num_preemptions)
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.new_token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        shows_end = self.request.params.include_stop_str_in_output
        return self.completions[update.sample_index].extend(update, shows_end=shows_end)

    def resumed(self) -> Resumed:
        """What a new scheduler state has to know of it."""
        return Resumed(
            request=self.request,
            outputs=tuple(tuple(each.token_ids) for each in self.completions),
            is_finished=tuple(each.finish_reason is not None for each in self.completions),
            has_prompt_logprobs=self.prompt_logprobs is not None,
        )

    def snapshot(self, now_s: float) -> RequestOutput:
        """The request so far; a failed one has an error and no outputs."""
        with_logprobs = self.request.params.logprobs is not None
        is_finished = self.is_finished
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(
                completion.snapshot(index, with_logprobs=with_logprobs)
                for index, completion in enumerate(self.shown)
            ),
            finished=is_finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            metrics=RequestMetrics(
                arrival_s=self.request.arrival_s,
                first_token_s=self.first_token_s,
                finish_s=now_s if is_finished else None,
                preemptions=self.num_preemptions,
            ),
        )

    def updates(self, told: Sequence[Told]) -> tuple[list[Update], tuple[Told, ...]]:
        """(what is new since `told`, the marks after it), of each completion."""
        shown = self.shown
        before = tuple(told) or (Told(),) * len(shown)
        after = tuple(completion.told for completion in shown)
        request_id, is_finished = self.request.request_id, self.is_finished
        with_logprobs = self.request.params.logprobs is not None
        news = [
            completion.update(request_id, index, before[index], with_logprobs=with_logprobs)
            for index, completion in enumerate(shown)
            if after[index] != before[index]
        ]
        if is_finished:
            last = news.pop() if news else Update(request_id, 0)
            news.append(replace(last, finished=True, error=self.error))
        return news, after
