"""Parameters as callers have them: the same plain tree, or an error that names the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze

from jaxpage.errors import ConfigError
from jaxpage.models.params import checked_params
from jaxpage.models.registry import init_params
from tests.models.toys import toy_config

CONFIG = toy_config()
PARAMS = init_params(CONFIG)
HEAD = "final_norm/scale"


def with_leaf(leaf: Any) -> dict[str, Any]:
    return {**PARAMS, "final_norm": {"scale": leaf}}


def deleted() -> jax.Array:
    leaf = jnp.zeros_like(PARAMS["final_norm"]["scale"])
    leaf.delete()
    return leaf


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tree: tree,
        lambda tree: {"params": tree},
        freeze,
        lambda tree: freeze({"params": tree}),
        lambda tree: nnx.State(jax.tree.map(nnx.Param, tree)),
        lambda tree: jax.tree.map(np.asarray, tree),
        lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, ">f4"), tree),
        lambda tree: jax.tree.map(lambda leaf: linen.Partitioned(leaf, (None,) * leaf.ndim), tree),
    ],
    ids=["dict", "wrapped", "frozen", "frozen wrapped", "nnx", "numpy", "big endian", "boxed"],
)
def test_every_form_of_a_tree_is_the_same_tree(wrap: Callable[[Any], Any]) -> None:
    found = checked_params(wrap(PARAMS), CONFIG)
    jax.tree.map(np.testing.assert_array_equal, found, PARAMS)
    assert type(found) is type(found["embed"]) is dict


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({name: PARAMS[name] for name in PARAMS if name != "final_norm"}, "without 'final_norm"),
        ({**PARAMS, "lora": jnp.zeros(3)}, "with 'lora'"),
        ({"params": PARAMS, "cache": {}}, "without "),
        ({**PARAMS, "embed": {"embedding": PARAMS["embed"]["embedding"].T}}, "; transpose it"),
        (jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS), "got bfloat16.*; cast it"),
        (jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), PARAMS), "got float64"),
        (with_leaf(None), f"got a NoneType as params '{HEAD}'"),
        (with_leaf([1.0]), f"got a list as params '{HEAD}'"),
        (with_leaf(jax.ShapeDtypeStruct((64,), jnp.float32)), "got a ShapeDtypeStruct"),
        (with_leaf({"a": jnp.zeros(64)}), f"without '{HEAD}'"),
        (with_leaf(deleted()), f"got a deleted or donated array as params '{HEAD}'"),
        ([PARAMS], "got params of type list"),
        (None, "got params of type NoneType"),
        ({}, "without "),
    ],
)
def test_what_is_no_such_tree_is_refused_by_name(tree: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*") as error:
        checked_params(tree, CONFIG)
    assert "\n" not in str(error.value) and ", wanted " in str(error.value)


def test_a_tree_inside_a_jit_is_refused() -> None:
    with pytest.raises(ConfigError, match="got a tracer"):
        jax.jit(lambda tree: checked_params(tree, CONFIG))(PARAMS)
