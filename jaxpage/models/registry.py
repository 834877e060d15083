"""From a config to a model: which module an architecture is, what its parameters are.

One table row an architecture. What a checkpoint calls things is `convert`'s business.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from jaxpage.backends import PLAIN
from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.ops import Ops
from jaxpage.device.types import StepInput, StepShape
from jaxpage.errors import ConfigError
from jaxpage.models.layers import INITIALIZERS
from jaxpage.models.llama import Llama
from jaxpage.terms import own_constants

ARCHITECTURES: Mapping[str, Callable[[ModelConfig], Llama]] = {
    "llama": Llama,
    "mistral": Llama,  # the same layers; the sliding window is in the config
}
"""Add a row to add a model: a module with Llama's `__call__` and `logits`."""


def build_model(config: ModelConfig) -> Llama:
    """The Linen module of config's architecture; it holds no arrays and knows no backend."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"got architecture {config.architecture!r}, wanted one of: {known}; "
            "convert the model or add a row to jaxpage.models.registry.ARCHITECTURES"
        )
    return ARCHITECTURES[config.architecture](config)


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
def init_params(config: ModelConfig | Llama, key: Array | int = 0) -> dict[str, Any]:
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
    """Operations to trace a model with that has no pool."""

    def attention(
        self, q: Array, k: Array, v: Array, layer_kv: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        return q, layer_kv
