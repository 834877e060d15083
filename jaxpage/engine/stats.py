"""Where the engine's time goes: a watch around its steps, another around its waiting."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up the wall time, in seconds, of the `with` blocks it is given to, one at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start
