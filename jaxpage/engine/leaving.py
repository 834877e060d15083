"""Lets a process end while another thread runs steps.

Python stops such a thread where it next wants to run Python code. Within a foreign library, the
device's or a tokenizer's, that is no place to stop: the process aborts. So each step holds a lock,
and the end of the process takes the locks and keeps them: a step that runs is waited for, the next
one never begins.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

MOST_WAIT_S = 60.0
"""How long a process that ends waits for a step."""
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_exit_lock() -> AbstractContextManager[Any]:
    """A lock to hold while a step runs; taken for good when the process ends."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


@atexit.register
def _close() -> None:
    for lock in tuple(_locks):
        lock.acquire(timeout=MOST_WAIT_S)
