"""A parameter tree as nested dicts and as paths: `{"a": {"b": x}}` and `{"a/b": x}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Paths to nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to paths: the inverse of `nest`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, f"{prefix}{key}/"))
        else:
            leaves[prefix + key] = value
    return leaves
