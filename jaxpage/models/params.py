"""Parameters in whatever form JAX libraries keep them, made into the one form the engine takes.

What is taken: dicts and other mappings (Flax's FrozenDict, `nnx.State`) of jax or NumPy arrays,
also inside {"params": ...} as `model.init` returns them, also boxed with partitioning metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpage.config import ModelConfig
from jaxpage.device.ops import Adapters
from jaxpage.errors import ConfigError
from jaxpage.models.registry import abstract_params
from jaxpage.weights import Quantized

Leaves = dict[tuple[str, ...], Any]


def checked_params(params: Any, config: ModelConfig) -> dict[str, Any]:
    """The tree as plain dicts of jax and NumPy arrays with the shapes and dtypes of the config.

    Raises ConfigError naming the first leaf that is missing, surplus, of another shape or dtype,
    deleted, or no array.
    """
    wanted = _leaves(abstract_params(config))
    given = _leaves(_unwrapped(params))
    for path in wanted:
        if path not in given:
            raise ConfigError(
                f"got params without {_name(path)}, wanted {_kind(wanted[path])} there; "
                f"add it{_holds(given)}"
            )
    for path in given:
        if path not in wanted:
            raise ConfigError(
                f"got params with {_name(path)}, wanted only what the config has; leave it out"
            )
    for path, leaf in given.items():
        given[path] = _checked_leaf(path, leaf, wanted[path])
    return _nest(given)


def check_adapters(adapters: Adapters, config: ModelConfig) -> None:
    """Raises ConfigError that names the first adapter which fits no matrix of the model, or whose
    entry 0 is not zeros, or which counts other adapters than the first does."""
    shapes = {path: leaf.shape for path, leaf in _leaves(abstract_params(config)).items()}
    kernels = {(p[0], p[-2]): s for p, s in shapes.items() if p[-1] == "kernel" and len(p) > 2}
    num_adapters = None
    for layer, matrices in adapters.items():
        for name, (down, up) in matrices.items():
            if (layer, name) not in kernels:
                known = sorted(matrix for of, matrix in kernels if of == "layers_0")
                raise ConfigError(
                    f"got an adapter of {layer}/{name}, wanted a layer of the model, such as "
                    f"layers_0, and a matrix of it: {', '.join(known)}; change the names"
                )
            *out, size = kernels[layer, name]
            num_adapters = down.shape[0] if num_adapters is None else num_adapters
            rank = down.shape[1]
            wanted = ((num_adapters, rank, size), (num_adapters, math.prod(out), rank))
            if (down.shape, up.shape) != wanted:
                raise ConfigError(
                    f"got an adapter of {layer}/{name} of shapes {down.shape} and {up.shape}, "
                    f"wanted {wanted[0]} and {wanted[1]}; reshape it"
                )
            if jax.device_get(down)[0].any() and jax.device_get(up)[0].any():
                raise ConfigError(
                    f"got an adapter 0 of {layer}/{name} that is not zeros, wanted zeros for rows "
                    "without an adapter; put zeros before the others"
                )


def check_same_form(params: dict[str, Any], before: dict[str, Any]) -> None:
    """Raises ConfigError that names the first weight which is quantised otherwise than before.

    Both trees are as `checked_params` returns them, of one config.
    """
    wanted = _leaves(before)
    for path, leaf in _leaves(params).items():
        if _form(leaf) != _form(wanted[path]):
            raise ConfigError(
                f"got {_form(leaf)} as params {_name(path)}, wanted {_form(wanted[path])}, as "
                "before; quantise it as the weights that it replaces, or build a new engine"
            )


def _form(leaf: Any) -> str:
    quantised = isinstance(leaf, Quantized)
    return f"one quantised in groups of {leaf.group}" if quantised else "an array"


def _unwrapped(params: Any) -> Mapping[Any, Any]:
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"got params of type {type(params).__name__}, wanted a dict of arrays as "
            "jaxpage.init_params gives it; pass the parameters alone"
        )
    if set(params) == {"params"} and isinstance(params["params"], Mapping):
        return params["params"]
    return params


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Leaves:
    if not isinstance(tree, Mapping):
        return {path: tree}
    found: Leaves = {}
    for name in tree:
        found |= _leaves(tree[name], (*path, str(name)))
    return found


def _nest(leaves: Leaves) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*names, last), leaf in leaves.items():
        place = tree
        for name in names:
            place = place.setdefault(name, {})
        place[last] = leaf
    return tree


def _checked_leaf(path: tuple[str, ...], leaf: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    leaf = _unboxed(leaf)
    if not isinstance(leaf, Quantized):
        return _checked_array(path, leaf, wanted)
    *out, size = wanted.shape
    if path[-1] in ("bias", "scale") or leaf.group < 1 or size % leaf.group:
        remedy = "quantise matrices alone, in groups that divide their last axis"
        raise _wrong(path, f"one quantised in groups of {leaf.group}", wanted, remedy)
    scales = (*out, size // leaf.group)
    return replace(
        leaf,
        values=_checked_array(
            (*path, "values"), leaf.values, jax.ShapeDtypeStruct(wanted.shape, jnp.int8)
        ),
        scales=_checked_array(
            (*path, "scales"), leaf.scales, jax.ShapeDtypeStruct(scales, wanted.dtype)
        ),
    )


def _checked_array(path: tuple[str, ...], leaf: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    if isinstance(leaf, Tracer):
        raise _wrong(path, "a tracer", wanted, "build the engine outside of jit")
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise _wrong(path, f"a {type(leaf).__name__}", wanted, "pass a jax or NumPy array")
    if isinstance(leaf, np.ndarray):  # from a file of another byte order, say
        leaf = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        remedy = "cast it, or change the config's dtype"
        if leaf.shape != wanted.shape:
            remedy = "transpose it" if leaf.shape == wanted.shape[::-1] else "reshape it"
        raise _wrong(path, _kind(leaf), wanted, remedy)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise _wrong(path, "a deleted or donated array", wanted, "pass what replaced it")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise _wrong(path, "an array of several processes", wanted, "gather it first")
    return leaf


def _unboxed(leaf: Any) -> Any:
    """The array of Flax's variables (nnx.Param) and boxes (nn.Partitioned)."""
    from flax import nnx
    from flax.core import meta

    if isinstance(leaf, nnx.Variable):
        leaf = leaf.get_value()
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


def _wrong(
    path: tuple[str, ...], got: str, wanted: jax.ShapeDtypeStruct, remedy: str
) -> ConfigError:
    return ConfigError(f"got {got} as params {_name(path)}, wanted {_kind(wanted)}; {remedy}")


def _name(path: tuple[str, ...]) -> str:
    return repr("/".join(path))


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def _holds(given: Leaves) -> str:
    names = list(dict.fromkeys(path[0] for path in given if path))
    return f" (there are {', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
