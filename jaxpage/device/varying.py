"""Arrays under `jax.shard_map`: which mesh axes they vary over, and how to make them vary.

`shard_map` checks that a loop's state and the branches of a condition keep the axes they vary over.
Fresh zeros vary over no axis, so they are given the axes of what they will hold.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")


def vary_alike(tree: Tree, *others: Any) -> Tree:
    """The tree, each leaf varying over every axis that any leaf of the tree or `others` does."""
    wanted = _axes((tree, *others))
    if not wanted:
        return tree

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(wanted - _axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def _axes(tree: Any) -> frozenset[Any]:
    axes = (jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree))
    return frozenset[Any]().union(*axes)
