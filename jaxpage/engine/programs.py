"""Compiled programs by key: each is lowered and compiled once, then only called.

A program compiled ahead of time refuses any other shape or dtype: nothing is recompiled unseen.
`expect` traces at once, in the caller's thread, because JAX's settings belong to a thread. It
compiles in the background, two programs at a time: XLA works outside the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from jax.stages import Compiled, Lowered

Lower = Callable[[], Lowered]
Report = Callable[[str, float], None]
"""Called with a program's name and the seconds its compilation took."""
Terms = Callable[[], AbstractContextManager[None]]
"""What programs are traced under, beside what the caller's thread has set."""


class Programs:
    """A table of compiled programs, filled on first use or ahead of it."""

    def __init__(
        self,
        *,
        num_threads: int = 2,
        report: Report | None = None,
        terms: Terms = nullcontext,
    ) -> None:
        self._report = report
        self._terms = terms
        self._compiled: dict[Hashable, Compiled] = {}
        self._pending: dict[Hashable, Future[Compiled]] = {}
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="jaxpage-compile")

    def __len__(self) -> int:
        """Programs compiled or being compiled."""
        return len(self._compiled.keys() | self._pending.keys())

    def keys(self) -> tuple[Hashable, ...]:
        """The programs that are compiled."""
        return tuple(self._compiled)

    def expect(self, key: Hashable, name: str, lower: Lower) -> None:
        """Starts compiling a program that will be needed soon."""
        if key not in self._compiled and key not in self._pending:
            self._submit(key, name, lower)

    def get(self, key: Hashable, name: str, lower: Lower) -> Compiled:
        """The compiled program; waits for it when it isn't ready.

        Raises what compiling it, or the report of that, raised. Where the wait is interrupted the
        compilation goes on; one that failed is tried again by the next call.
        """
        future = self._pending.get(key)
        if future is None or (future.done() and key not in self._compiled):
            program = self._compiled.get(key)
            if program is not None:
                return program
            future = self._submit(key, name, lower)
        try:
            return future.result()
        finally:
            if future.done():
                self._pending.pop(key, None)

    def close(self) -> None:
        """Drops every program; waits for the ones being compiled."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._compiled.clear()

    def _submit(self, key: Hashable, name: str, lower: Lower) -> Future[Compiled]:
        start = time.perf_counter()
        with self._terms():
            lowered = lower()
        traced_s = time.perf_counter() - start
        future = self._executor.submit(self._compile, key, name, lowered, traced_s)
        self._pending[key] = future
        return future

    def _compile(self, key: Hashable, name: str, lowered: Lowered, traced_s: float) -> Compiled:
        start = time.perf_counter()
        program = self._compiled[key] = lowered.compile()
        if self._report is not None:
            self._report(name, traced_s + time.perf_counter() - start)
        return program
