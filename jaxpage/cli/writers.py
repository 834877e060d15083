"""Finished requests to stdout or a file, in input order, each as soon as its turn comes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from jaxpage.outputs import CompletionOutput, RequestOutput, TokenLogprob

HEADER_CHARS = 60


class OutputError(OSError):
    """Results that can't be written: a full disk, a closed file."""


class Output:
    """The file that results go to. Its failures are OutputErrors, unlike any others."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding or "utf-8"  # that of a StringIO is None

    def write(self, text: str) -> int:
        with _told():
            return self._file.write(text)

    def flush(self) -> None:
        with _told():
            self._file.flush()

    def close(self) -> None:
        with _told():
            self._file.close()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # no failure: the reader has seen enough
        raise
    except OSError as error:
        raise OutputError(*error.args) from error


class Writer(Protocol):
    """Takes one finished request at a time, in order."""

    def write(self, index: int, output: RequestOutput) -> None: ...


class JsonlWriter:
    """One JSON object a line."""

    def __init__(self, file: Output) -> None:
        self._file = file

    def write(self, index: int, output: RequestOutput) -> None:
        record = {
            "index": index,
            "prompt": output.prompt,
            "prompt_token_ids": list(output.prompt_token_ids),
            "outputs": [_completion(completion) for completion in output.outputs],
            "prompt_logprobs": _logprobs(output.prompt_logprobs),
            "num_cached_tokens": output.num_cached_tokens,
            "error": output.error,
        }
        line = json.dumps(record, ensure_ascii=False)
        try:
            line.encode(self._file.encoding)
        except UnicodeEncodeError:  # a narrow terminal, or a refused prompt that is no Unicode
            line = json.dumps(record)
        self._file.write(line + "\n")
        self._file.flush()


class TextWriter:
    """The texts alone; of several requests, each under a line with its prompt."""

    def __init__(self, file: Output, *, with_headers: bool) -> None:
        self._file = file
        self._with_headers = with_headers

    def write(self, index: int, output: RequestOutput) -> None:
        if output.error is not None:
            return  # told on stderr
        for completion in output.outputs:
            if self._with_headers:
                self._file.write(f"[{index}] {_shortened(output.prompt)}\n")
            self._file.write(completion.text + "\n")
            if self._with_headers:
                self._file.write("\n")
        self._file.flush()


class InOrder:
    """Holds finished requests back until every earlier one has been written."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._held: dict[int, RequestOutput] = {}
        self._next = 0

    def put(self, index: int, output: RequestOutput) -> None:
        self._held[index] = output
        if output.error is not None:
            sys.stderr.write(f"error: request {index}: {output.error}\n")
        while self._next in self._held:
            self._writer.write(self._next, self._held.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Writes what is finished, whatever is missing between."""
        for index in sorted(self._held):
            self._writer.write(index, self._held.pop(index))


def _shortened(prompt: str | None) -> str:
    text = "" if prompt is None else " ".join(prompt.split())
    return text if len(text) <= HEADER_CHARS else text[: HEADER_CHARS - 1] + "…"


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "cumulative_logprob": _number(completion.cumulative_logprob),
        "logprobs": _logprobs(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "score": None if completion.score is None else _number(completion.score),
    }


def _logprobs(entries: tuple[TokenLogprob | None, ...] | None) -> list[Any] | None:
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            "token_id": entry.token_id,
            "logprob": _number(entry.logprob),
            "top": [[token_id, _number(logprob)] for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _number(value: float) -> float | None:
    """JSON has no infinities: a forbidden token's log-probability is null, and so is a score that
    a length to a huge negative power has blown up."""
    return value if math.isfinite(value) else None
