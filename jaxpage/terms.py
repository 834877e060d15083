"""The settings of JAX that this package's code runs under, whatever the caller's thread has set.

An engine without a placement has one device: JAX's default (`jax.default_device`) where it is
built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

Device = Any
"""A jax.Device."""


def default_device() -> Device:
    """The device that JAX puts new arrays on in this thread."""
    chosen = getattr(jax.config, "jax_default_device")  # noqa: B009  # unknown to type checkers
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


@contextmanager
def engine_terms(device: Device) -> Iterator[None]:
    """The settings an engine of this device builds and traces under; others stay the caller's.

    A mesh would spread its arrays over other devices, and `jax_disable_jit` can compile nothing
    ahead of time.
    """
    with ExitStack() as stack:
        stack.enter_context(jax.default_device(device))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(own_constants())
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(jax.sharding.Mesh(np.array(device), ())))
        yield


@contextmanager
def own_constants() -> Iterator[None]:
    """For functions called outside of jit: there each of their constants is a transfer, which
    `jax_transfer_guard` may forbid, and an intended infinity trips `jax_debug_infs`.

    pallas_kernels has a copy, because it is used on its own too."""
    with jax.transfer_guard_host_to_device("allow"), jax.debug_infs(False):
        yield
