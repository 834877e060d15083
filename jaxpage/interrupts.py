"""Ctrl-C on a command line: at first it ends the process at once, later after cleaning up.

A KeyboardInterrupt alone is not enough: an extension that is being imported turns it into an
ImportError, and one raised in a callback of the garbage collector, as JAX has, is printed and lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process with a word and code 130; a command's first act."""
    signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C raises KeyboardInterrupt; the function yielded raises it again if
    it was swallowed. Does nothing outside the main thread, where no signal arrives."""
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def end(code: int) -> NoReturn:
    """Ends the process; after Ctrl-C without waiting for programs that are being compiled."""
    if code == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or never there
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _leave(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
