"""From a config to a model: which family it is of, its module, what its parameters are.

One table row a family; `register` adds one from outside.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from jaxpage.backends import PLAIN
from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.ops import Model, Ops
from jaxpage.device.types import StepInput, StepShape
from jaxpage.errors import ConfigError
from jaxpage.models.families.llama import LLAMA
from jaxpage.models.families.mistral import MISTRAL
from jaxpage.models.family import Family, Format
from jaxpage.models.layers import INITIALIZERS
from jaxpage.terms import own_constants

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL)}
"""By `ModelConfig.architecture`. A shipped family is a row here, any other is registered."""


def register(family: Family) -> Family:
    """Make a family known to `build_model` and every reader of files, as the shipped ones are.

    Replaces one of the same name. ConfigError when files of another family use one of its names.
    """
    for format, layout in family.layouts.items():
        for name in layout.names:
            other = stored_as(format, name)
            if other is not None and other.name != family.name:
                raise ConfigError(
                    f"got the family {family.name}, which {format} files call {name!r}, as they do "
                    f"{other.name}, wanted a name of its own; choose another"
                )
    FAMILIES[family.name] = family
    return family


def family_of(config: ModelConfig) -> Family:
    """The family of a config; ConfigError for an unknown `architecture`."""
    return family_named(config.architecture)


def family_named(name: str) -> Family:
    """The family of this `ModelConfig.architecture`; ConfigError for an unknown name."""
    if name not in FAMILIES:
        raise ConfigError(
            f"got architecture {name!r}, wanted one of: {', '.join(sorted(FAMILIES))}; "
            "convert the model or register its family: jaxpage.models.registry.register"
        )
    return FAMILIES[name]


def stored_as(format: Format, name: object) -> Family | None:
    """The family that a format's files call `name`, if there is one."""
    stored = (family for family in FAMILIES.values() if format in family.layouts)
    return next((family for family in stored if name in family.layouts[format].names), None)


def names_in(format: Format) -> list[str]:
    """What a format's files call the families that can be read from them, in order."""
    layouts = (family.layouts.get(format) for family in FAMILIES.values())
    return sorted(name for layout in layouts if layout is not None for name in layout.names)


def build_model(config: ModelConfig) -> Any:
    """The Linen module of config's family; it holds no arrays and knows no backend."""
    return family_of(config).module(config)


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree as shapes and dtypes (jax.ShapeDtypeStruct): what a checkpoint must fill.

    Every layer is like the first, so one layer is traced however many there are.
    """
    model = build_model(replace(config, num_layers=1))
    shapes = StepShape(1, 1, 1, 1, num_single=0).fields()
    fields: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in shapes.items()
    }
    step = StepInput(**fields)

    def init(step: StepInput) -> Any:
        ops = _NoAttention.of(step, PLAIN)
        return model.init(jax.random.key(0), step.tokens, step.positions, (None,), ops)

    tree = jax.eval_shape(init, step)
    params = dict(tree["params"])
    layer = params.pop("layers_0")
    for index in range(config.num_layers):
        params[f"layers_{index}"] = jax.tree.map(lambda leaf: leaf, layer)
    return params


@own_constants()
def init_params(config: ModelConfig | Model, key: Array | int = 0) -> dict[str, Any]:
    """Random parameters as training starts from: matrices normal, biases 0, norm scales 1.

    The numbers of a leaf depend on `key` (a jax key or a seed) and the leaf's path alone.
    """
    config = config if isinstance(config, ModelConfig) else config.config
    root = jax.random.key(key) if isinstance(key, int) else key

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        names = [entry.key for entry in path]
        leaf_key = jax.random.fold_in(root, zlib.crc32("/".join(names).encode()))
        return INITIALIZERS[names[-1]](leaf_key, leaf.shape, leaf.dtype)

    return jax.tree.map_with_path(draw, abstract_params(config))


def num_params(config: ModelConfig) -> int:
    """Numbers in the parameter tree; a tied matrix counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


@register_dataclass
@dataclass(frozen=True)
class _NoAttention(Ops):
    """Operations for tracing a model without a pool."""

    def attention(
        self, q: Array, k: Array, v: Array, layer_kv: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        return q, layer_kv
