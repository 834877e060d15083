"""What the workers have in common: jobs come in, figures go out.

Standard library only: a worker runs in its own engine's environment, where jaxpage is not.

    {"job": "batch", "prompts": [[1, 5], ...], "lengths": [20, ...]}  ->  {"seconds": 9.1, ...}
    {"job": "prefill", "prompt": [1, 5, ...]}                          ->  {"seconds": 0.7}
    {"job": "stream", "prompt": [1, 5, ...], "new_tokens": 64}         ->  {"seconds": 2.1}

A figure that can't be told is no number: {"error": "got ..."}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.common.timing import ADVICE, Disturbed


class Engine(Protocol):
    """One engine on the float32 weights; outputs have the lengths asked for, whatever is drawn."""

    about: str
    """Name, version, dtype and form of batching, for the table."""

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        """Completes all prompts; seconds to each one's first token, where the engine tells."""
        ...

    def prefill(self, prompt: list[int]) -> None:
        """Reads a prompt and draws one token."""
        ...

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        """Seconds of `new_tokens` decode steps after the prompt and its first token."""
        ...


def serve(build: Callable[[str], Engine]) -> None:
    """Runs jobs from standard input until it ends; argument 1 is the model's folder or file."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines talk on stdout; only replies go there
    engine = build(sys.argv[1])
    reply(replies, {"about": engine.about})
    for line in sys.stdin:
        try:
            figures = run(engine, json.loads(line))
        except Disturbed as error:
            figures = {"error": str(error)}
        reply(replies, figures)


def reply(replies: Any, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")


def run(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    first_token_s = None
    if job["job"] == "batch":
        first_token_s = engine.batch(job["prompts"], job["lengths"])
    elif job["job"] == "prefill":
        engine.prefill(job["prompt"])
    else:
        seconds = engine.stream(job["prompt"], job["new_tokens"])
        if seconds <= 0:
            got = f"got {seconds:.2f} s for {job['new_tokens']} tokens"
            raise Disturbed(f"{got}, wanted more than none; {ADVICE}")
        return {"seconds": seconds, "peak_bytes": peak_bytes()}
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "first_token_s": first_token_s, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Most memory this process has held, weights included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
