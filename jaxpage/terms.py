"""What JAX is set to where our own code runs, whatever the caller's thread has set.

The rule of place: an engine has one device, JAX's default one (`jax.default_device`) where it is
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
    """What an engine of this device builds and traces under; the rest is as the caller set it.

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
    """For what is called outside of any jit: there each constant of ours is a transfer, which
    `jax_transfer_guard` may forbid, and an infinity that is meant trips `jax_debug_infs`.

    pallas_kernels, which is used on its own too, has the same."""
    with jax.transfer_guard_host_to_device("allow"), jax.debug_infs(False):
        yield
