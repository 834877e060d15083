"""Turn stored tensors into our parameter leaves, one leaf at a time, with nothing left over.

Knows the rule tables and shapes; knows no file format.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxpage.config import DType, ModelConfig
from jaxpage.errors import CheckpointError
from jaxpage.formats.rules import EMBEDDING, HEAD, fill, is_derived, source_of, source_shape
from jaxpage.formats.tensors import Tensor
from jaxpage.formats.tree import flatten
from jaxpage.models.family import Rule
from jaxpage.models.registry import abstract_params
from jaxpage.reading import reading

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """One leaf of the tree and the stored tensors that fill it."""

    path: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Rule, Tensor], ...]


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter of the model."""
    with reading("a model's config", "sizes that a model can be built of"):
        return {path: leaf.shape for path, leaf in flatten(abstract_params(config)).items()}


def num_bytes(shapes: Iterable[tuple[int, ...]], dtype: DType) -> int:
    """Bytes of arrays of these shapes together."""
    return sum(math.prod(shape) for shape in shapes) * NUMPY_DTYPES[dtype].itemsize


def check_leaves(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """CheckpointError for the first leaf that is missing, surplus or of a wrong shape."""
    for path, shape in wanted.items():
        if path not in found:
            raise _missing(path, path, shape, source)
        if found[path] != shape:
            raise _mis_shaped(path, found[path], shape, source)
    surplus = sorted(set(found) - set(wanted))
    if surplus:
        raise _surplus(surplus, found[surplus[0]], source)


def check_sizes(config: ModelConfig, shapes: Collection[tuple[int, ...]], source: str) -> None:
    """CheckpointError when a config asks for more than all its weights hold.

    Call it before anything is made of the config's sizes, which may be any numbers.
    """
    total = sum(math.prod(shape) for shape in shapes)
    sizes = {
        "num_layers": (config.num_layers, len(shapes)),
        "vocab_size": (config.vocab_size, total),
        "hidden_size": (config.hidden_size, total),
        "intermediate_size": (config.intermediate_size, total),
        "num_heads * head_dim": (config.num_heads * config.head_dim, total),
    }
    for name, (value, most) in sizes.items():
        if value > most:
            raise CheckpointError(
                f"got {name}={value} in the config of {source}, whose {len(shapes)} tensors hold "
                f"{total} numbers, wanted weights of that size; the weights and the config are not "
                "of one model"
            )


def plan_leaves(
    config: ModelConfig, tensors: Mapping[str, Tensor], rules: tuple[Rule, ...], source: str
) -> list[LeafPlan]:
    """Match every stored tensor with a leaf; CheckpointError names what is missing or surplus."""
    check_sizes(config, [tensor.shape for tensor in tensors.values()], source)
    shapes = leaf_shapes(config)
    parts: dict[str, list[tuple[Rule, Tensor]]] = {path: [] for path in shapes}
    known: set[str] = set()
    for rule, name, path in expand(rules, config):
        if path is None:
            known.add(name)
            continue
        if path not in shapes:
            if path == HEAD and name in tensors:
                known.add(name)
                _check_tied_head(tensors, rules, tensors[name], source)
            continue
        known.add(name)
        wanted = source_shape(rule, shapes[path])
        if name not in tensors:
            raise _missing(name, path, wanted, source)
        if tensors[name].shape != wanted:
            raise _mis_shaped(name, tensors[name].shape, wanted, source)
        parts[path].append((rule, tensors[name]))
    surplus = sorted(
        name for name in set(tensors) - known if not is_derived(name, tensors[name].shape)
    )
    if surplus:
        raise _surplus(surplus, tensors[surplus[0]].shape, source)
    return [LeafPlan(path, shapes[path], tuple(parts[path])) for path in shapes]


def read_leaf(plan: LeafPlan, dtype: DType) -> NDArray[Any]:
    """Read one leaf's tensors into a fresh array; warns about values that are not finite."""
    leaf = _fresh(plan.shape, NUMPY_DTYPES[dtype])
    for rule, tensor in plan.parts:
        with (
            reading(f"tensor {tensor.name}", "values of its shape and type"),
            np.errstate(over="ignore", invalid="ignore"),
        ):
            fill(rule, leaf, tensor.read())
    names = ", ".join(tensor.name for _, tensor in plan.parts)
    _warn_if_not_finite(leaf, names)
    return leaf


def expand(rules: tuple[Rule, ...], config: ModelConfig) -> Iterator[tuple[Rule, str, str | None]]:
    """Every rule with its layer numbers filled in: (rule, stored name, leaf path)."""
    for rule in rules:
        layers = range(config.num_layers) if "{i}" in rule.source else (0,)
        for i in layers:
            target = None if rule.target is None else rule.target.format(i=i)
            yield rule, rule.source.format(i=i), target


def _missing(name: str, path: str, wanted: tuple[int, ...], source: str) -> CheckpointError:
    advice = "the file is incomplete or of another model"
    if path == HEAD:
        advice = "the config says that the head is not tied to the embedding"
    return CheckpointError(
        f"got no tensor {name} in {source}, wanted one of shape {list(wanted)}; {advice}"
    )


def _mis_shaped(
    name: str, found: tuple[int, ...], wanted: tuple[int, ...], source: str
) -> CheckpointError:
    return CheckpointError(
        f"got tensor {name} of shape {list(found)} in {source}, wanted {list(wanted)}; "
        "the weights and the config are not of one model"
    )


def _surplus(names: list[str], shape: tuple[int, ...], source: str) -> CheckpointError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return CheckpointError(
        f"got tensor {names[0]} of shape {list(shape)}{more} in {source}, wanted no tensor of "
        "that name for this config; the weights and the config are not of one model"
    )


def _check_tied_head(
    tensors: Mapping[str, Tensor], rules: tuple[Rule, ...], head: Tensor, source: str
) -> None:
    """Warn when a tied model also stores a head that is not its embedding."""
    embedding = tensors.get(source_of(rules, EMBEDDING))
    if embedding is None or embedding.shape != head.shape:
        same = False
    else:
        same = np.array_equal(embedding.read(), head.read(), equal_nan=True)
    if not same:
        warnings.warn(
            f"{source} ties the head to the embedding and also stores {head.name}, which differs "
            "from it; the embedding is used",
            stacklevel=2,
        )


def _warn_if_not_finite(leaf: NDArray[Any], names: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(leaf, dtype=np.float32)
    if np.isfinite(total):
        return
    num_nan = int(np.isnan(leaf).sum())
    num_inf = int(np.isinf(leaf).sum())
    if num_nan or num_inf:
        warnings.warn(
            f"{names} holds {num_nan} NaN and {num_inf} infinite values in {leaf.dtype}; "
            "outputs will be meaningless where they are used",
            stacklevel=2,
        )


def _fresh(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A new array that starts at a memory page, so that JAX on a CPU uses it without a copy.

    Large pages, where the system has them, take a third off the time to fill a whole model.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
