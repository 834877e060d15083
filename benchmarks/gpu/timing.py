"""How a call on a device is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_of(call: Callable[..., Any], *arrays: Any, min_seconds: float) -> float:
    """Seconds a call, warm: calls are dispatched in a row until they fill `min_seconds`."""
    result = jax.block_until_ready(call(*arrays))
    times = 1
    while True:
        start = time.perf_counter()
        for _ in range(times):
            result = call(*arrays)
        jax.block_until_ready(result)
        taken = time.perf_counter() - start
        if taken >= min_seconds:
            return taken / times
        times = min(times * 4, 4096)
