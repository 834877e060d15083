"""What a measured figure is made of: seconds of a call, a spread over rounds, a safe difference.

Standard library only: workers import it where another engine is installed and jaxpage is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

TRIES = 3
ADVICE = "run it while nothing else runs"


class Disturbed(RuntimeError):
    """A figure that what else ran on the machine has made meaningless: it is not measurable."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of the same thing measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"

    def __truediv__(self, other: Spread) -> Spread:
        """Ratios of figures taken in the same round."""
        return Spread(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def longer_less_shorter(generate: Callable[[int], Any], new_tokens: int) -> float:
    """Seconds of `new_tokens` steps: a run of one more less a run of one.

    Whatever else the machine does lands in one of the two. So the shorter one, a prefill, is run
    before and after, the lesser counts, and where the longer one is no longer all are run again.
    Raises Disturbed when that does not help.
    """
    before = longer = after = 0.0
    for _ in range(TRIES):
        before, longer, after = (
            timed(partial(generate, count)) for count in (1, new_tokens + 1, 1)
        )
        if longer > max(before, after):
            return longer - min(before, after)
    raise Disturbed(
        f"got {longer:.2f} s for {new_tokens + 1} tokens and {max(before, after):.2f} s for one, "
        f"{TRIES} times over, wanted more for more; {ADVICE}"
    )
