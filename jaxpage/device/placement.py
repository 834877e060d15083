"""Where arrays live: the one owner of transfers to devices, and of what lowering is told of them.

One device, or a mesh: its axes cut the parameters and the pool by rules; everything else is whole
on every device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpage.device.huge_pages import renew_zeros, use_huge_pages
from jaxpage.errors import ConfigError
from jaxpage.terms import Device, default_device, engine_terms

WHOLE = PartitionSpec()
"""Uncut: all of it on every device."""
Rules = tuple[tuple[str, PartitionSpec], ...]
"""(regular expression, spec): the first that is found in a parameter's path, "a/b/c", counts."""


def put(tree: Any) -> Any:
    """The tree's arrays on JAX's default device, in one transfer; those already there stay."""
    return jax.device_put(tree)


@dataclass(frozen=True)
class Placement:
    """One device; or a mesh, how parameters are cut over it, and how the pool's arrays are.

    `rules` must have one for every parameter; `pool` is the spec of the pool's [P, S, K, H]. Raises
    ConfigError for rules without a mesh.
    """

    device: Device | None = None
    mesh: Mesh | None = None
    rules: Rules = ()
    pool: PartitionSpec = WHOLE

    def __post_init__(self) -> None:
        if self.mesh is None and (self.rules or self.pool != WHOLE):
            raise ConfigError("got rules and no mesh, wanted both; give the mesh they are for")
        if self.mesh is None and self.device is None:
            object.__setattr__(self, "device", default_device())

    @property
    def first_device(self) -> Device:
        """The device, or the first of the mesh."""
        return self.device if self.mesh is None else self.mesh.devices.flat[0]

    def terms(self) -> AbstractContextManager[None]:
        """The settings of JAX that its programs are traced under."""
        return engine_terms(self.first_device)

    def put(self, tree: Any) -> Any:
        """The host's arrays, whole on every device, in one transfer."""
        return jax.device_put(tree, self.device if self.mesh is None else self._whole)

    def put_params(self, tree: Any) -> Any:
        """Parameters cut by the rules; those already placed so stay.

        On a CPU they are moved into large memory pages, while other work goes on.
        """
        if self.mesh is not None:
            return jax.tree.map_with_path(self._put_param, tree)
        placed = jax.device_put(tree, self._whole)
        use_huge_pages(placed)
        return placed

    def put_pool(self, make: Callable[[], Any]) -> Any:
        """The pool of zeros that `make` returns; on a mesh each device makes its own part."""
        if self.mesh is None:
            with self.terms():
                pool = self.put(make())
                renew_zeros(pool)
                return pool
        return jax.jit(make, out_shardings=self._sharding(self.pool))()

    def shapes(self, tree: Any) -> Any:
        """What lowering reads of a tree of arrays: shapes, dtypes, and on a mesh their cut."""
        return jax.tree.map(self._shape, tree)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What lowering reads of one of the host's arrays."""
        sharding = None if self.mesh is None else self._whole
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def outputs(self, specs: Any) -> dict[str, Any]:
        """Options of `jax.jit` for a program whose outputs are cut as `specs` says, a spec for each
        or for a tree of them. A mesh's programs are told: what one puts out another takes, and its
        compiler would choose for each. One device has no choice."""
        if self.mesh is None:
            return {}

        def is_spec(entry: Any) -> bool:
            return isinstance(entry, PartitionSpec)

        return {"out_shardings": jax.tree.map(self._sharding, specs, is_leaf=is_spec)}

    def _put_param(self, path: tuple[Any, ...], leaf: Any) -> Any:
        spec = self._rule(path)
        sharding = self._sharding(spec)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ConfigError(
                f"got the parameter {_name(path)!r} of shape {leaf.shape} to cut as {spec} "
                f"({error}), wanted axes that the mesh divides; change its rule or the mesh"
            ) from None
        return jax.device_put(leaf, sharding)

    def _shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else getattr(leaf, "sharding", None) or self._whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    @property
    def _whole(self) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, WHOLE)

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        assert self.mesh is not None, "rules are for a mesh"
        return NamedSharding(self.mesh, spec)

    def _rule(self, path: tuple[Any, ...]) -> PartitionSpec:
        name = _name(path)
        for pattern, spec in self.rules:
            if re.search(pattern, name):
                return spec
        raise ConfigError(
            f"got no rule for the parameter {name!r}, wanted one for each; add a rule for it"
        )


def _name(path: tuple[Any, ...]) -> str:
    """a/b/c of a path in a tree; of a quantised leaf's parts the leaf's own."""
    return "/".join(str(entry.key) for entry in path if hasattr(entry, "key"))
