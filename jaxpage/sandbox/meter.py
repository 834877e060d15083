"""What a template has left of time and memory, and what its values weigh.

The weight of a value is the length of its text: a list that holds one text a thousand times weighs
a thousand, so that printing and comparing are bounded too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2.utils import Namespace

from jaxpage.errors import RequestError

MOST_S = 8.0
"""Seconds that a template may take."""
MOST_WEIGHT = 1 << 24
"""Characters of any text or list that it makes; the longest prompts known have a few million."""
MOST_BYTES = 512 << 20
"""Memory of all that it makes together."""
MOST_STEPS = 5_000_000
MOST_BITS = 1 << 14
_VIEWS = ({}.keys(), {}.values(), {}.items())
_LEAST = 16
"""What any value weighs at least."""
CONTAINERS = (list, tuple, dict, set, frozenset, *(type(view) for view in _VIEWS))


class Meter:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MOST_S
        self._steps, self._bytes = MOST_STEPS, MOST_BYTES
        self._weights: dict[int, tuple[object, int]] = {}
        """id(object) -> (object, weight); the object is kept so that its id stays its own."""

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline:
            refuse(f"takes more than {MOST_S:.0f} s or {MOST_STEPS} steps")

    def made(self, value: Any) -> Any:
        """`value`, a new one, after it was weighed."""
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            refuse(f"makes numbers of more than {MOST_BITS} bits")
        if isinstance(value, (str, bytes, *CONTAINERS)) and id(value) not in self._weights:
            self.weigh(value)
            size = sys.getsizeof(value)
            self._bytes -= size
            if self._bytes < 0:
                refuse(f"makes more than {MOST_BYTES} bytes of text and lists")
            if size > 1024:
                self._weights.setdefault(id(value), (value, len(value)))
        return value

    def weigh(self, *values: Any) -> int:
        """The weight of the values together; RequestError if it is too large."""
        total = sum(map(self._weight, values))
        if total > MOST_WEIGHT:
            refuse(f"makes texts or lists of more than {MOST_WEIGHT} characters")
        return total

    def _weight(self, value: Any) -> int:
        if type(value) is int:
            return _LEAST
        if isinstance(value, (str, bytes)):
            return _LEAST + len(value)
        if isinstance(value, Namespace):  # it may hold itself many times
            refuse("uses a namespace as a value")
        if not isinstance(value, CONTAINERS):
            return _LEAST
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        weight = _LEAST
        for each in value.items() if isinstance(value, dict) else value:
            weight += (
                sum(map(self._weight, each)) if isinstance(value, dict) else self._weight(each)
            )
            if weight > MOST_WEIGHT:
                break
        self._weights[id(value)] = (value, weight)
        return weight


_METER: ContextVar[Meter] = ContextVar("meter")


@contextmanager
def metered() -> Iterator[None]:
    """Compiling and rendering happen inside: what they use is counted together."""
    token = _METER.set(Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def meter() -> Meter:
    """The meter of the rendering in progress."""
    return _METER.get()


def steps(values: Iterable[Any]) -> Iterator[Any]:
    """The values; each counts as a step."""
    of_now = meter()
    for each in values:
        of_now.step()
        yield each


def check_size(size: float) -> None:
    """Refuses what would have more characters than anything may."""
    if size > MOST_WEIGHT:
        refuse(f"makes texts or lists of more than {MOST_WEIGHT} characters")


def check_bits(bits: int) -> None:
    """Refuses a number that would have more bits than any may."""
    if bits > MOST_BITS:
        refuse(f"makes numbers of more than {MOST_BITS} bits")


def refuse(what: str) -> NoReturn:
    """Raises the RequestError of a template that does too much."""
    raise RequestError(
        f"got a chat template that {what}, wanted one that writes a prompt; pass template= or mend "
        "the model's files"
    )
