"""Lets a process end while another thread runs steps.

Python stops such a thread where it next wants to run Python code. Within a foreign library, the
device's or a tokenizer's, that is no place to stop: the process aborts. So each step passes a gate,
and the gates close at the end of the process: a step that runs is waited for, the next one never
begins.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

MOST_WAIT_S = 60.0
"""How long a process that ends waits for a step."""
_gates: weakref.WeakSet[Any] = weakref.WeakSet()


def new_gate() -> AbstractContextManager[Any]:
    """A lock to hold while a step runs; taken for good when the process ends."""
    gate = threading.RLock()
    _gates.add(gate)
    return gate


@atexit.register
def _close() -> None:
    for gate in tuple(_gates):
        gate.acquire(timeout=MOST_WAIT_S)
