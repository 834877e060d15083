"""How a kernel is called and for which card: the one file that knows JAX's versions and backends.

Pallas lowers to Triton only when given its `CompilerParams`; without them jax 0.10 takes
Mosaic GPU. Triton's lowering is deprecated from jax 0.11 on: see docs/decisions for the successor.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.config import Target, Tuning

load = triton.load
store = triton.store

# Known, and recorded as a decision; users of the kernels can do nothing about it.
warnings.filterwarnings(
    "ignore", "The Pallas Triton backend is deprecated", category=DeprecationWarning
)

_FOREIGN: ContextVar[Target | None] = ContextVar("pallas_kernels_target", default=None)


def local_target() -> Target:
    """The card of this process, or a common one where there is none."""
    return _FOREIGN.get() or _own_target()


@contextmanager
def lowering_for(target: Target, device_kind: str) -> Iterator[None]:
    """Lowers kernels, inside the `with`, for a card that this machine may not have.

    `device_kind` is how JAX names the card, as in jax.devices()[0].device_kind.
    """
    token = _FOREIGN.set(target)
    try:
        if jax.__version_info__ < (0, 11):  # lowers for any card without being told which
            yield
            return
        named: dict[str, Any] = {"device_kind": device_kind, "num_cores": None}
        if "platform" in inspect.signature(jax.sharding.AbstractDevice).parameters:
            named["platform"] = "gpu"
        device = jax.sharding.AbstractDevice(**named)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        _FOREIGN.reset(token)


@contextmanager
def own_constants() -> Iterator[None]:
    """Lets a public function be called outside of jit under JAX's switches for debugging.

    Outside of jit each of its constants is a transfer to the device, which `jax_transfer_guard` may
    forbid, and an intended infinity (the log-sum-exp of no keys) would trip `jax_debug_infs`.
    """
    with jax.transfer_guard_host_to_device("allow"), jax.debug_infs(False):
        yield


@cache
def _own_target() -> Target:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return Target()
    capability = str(device.compute_capability).replace(".", "")
    return Target(f"sm_{capability}", device.core_count)


def call(
    kernel: Callable[..., None],
    *arrays: Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    tuning: Tuning,
    interpret: bool | None,
) -> list[Array]:
    """The kernel's outputs. It gets each array whole, in the card's memory, and loads from there.

    interpret None: compiled where the program runs on a GPU, interpreted elsewhere. That is
    decided when the program is lowered, not by the backend of this process, so that a machine
    without a card can compile for one. Under shard_map the outputs vary over each mesh axis that
    some input varies over. To be interpreted there, a kernel needs shard_map's `check_vma=False`,
    because JAX's interpreter makes index arrays that vary over no axis.
    """
    varying = frozenset[Any]().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    out_type = jax.sharding.ManualAxisType(varying=varying)
    outputs = [
        jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=out_type) for out in out_shape
    ]

    def run(interpreted: bool) -> Callable[..., list[Array]]:
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[anywhere] * len(arrays),
            out_specs=[anywhere] * len(outputs),
            out_shape=outputs,
            compiler_params=triton.CompilerParams(
                num_warps=tuning.num_warps, num_stages=tuning.num_stages
            ),
            interpret=interpreted,
            name=name,
        )

    def interpreted(*arrays: Array) -> list[Array]:
        """Hides a mesh's explicit axes from the interpreter: the arrays it makes have none."""
        axes = _explicit_axes()
        if not axes:
            return run(True)(*arrays)
        whole = jax.sharding.PartitionSpec()
        hidden: Any = jax.sharding.auto_axes(run(True), axes=axes, out_sharding=whole)
        return hidden(*arrays)

    if interpret is not None:
        return list(interpreted(*arrays) if interpret else run(False)(*arrays))
    return list(lax.platform_dependent(*arrays, cuda=run(False), default=interpreted))


def _explicit_axes() -> tuple[Any, ...]:
    """The axes of the current mesh whose shardings are part of an array's type."""
    mesh = jax.sharding.get_abstract_mesh()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit)
