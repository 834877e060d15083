"""Any model that can be read, as one value: a config, leaf shapes and an iterator of leaves.

Source formats and converted directories look alike from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from jaxpage.config import DType, ModelConfig
from jaxpage.formats.assemble import num_bytes, plan_leaves, read_leaf
from jaxpage.formats.converted import PARAMS_NAME, converted_leaves, read_own_config
from jaxpage.formats.orbax_io import read_leaves
from jaxpage.formats.sources import Kind, detect, open_source

LeafReader = Callable[[DType], Iterator[tuple[str, NDArray[Any]]]]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk, checked against its config, its data not yet read."""

    kind: Kind
    path: Path
    config: ModelConfig
    """`config.dtype` is the dtype as stored."""
    shapes: Mapping[str, tuple[int, ...]]
    files: tuple[Path, ...]
    """The weight files of a source format; empty for a converted directory."""
    leaves: LeafReader
    """dtype -> an iterator of (path, array), each leaf cast to it."""
    gguf_metadata: Mapping[str, Any] | None = None

    def num_bytes(self, dtype: DType) -> int:
        """Bytes of all parameters in `dtype`."""
        return num_bytes(self.shapes.values(), dtype)


def open_model(path: Path) -> StoredModel:
    """Read headers and configs; CheckpointError for tensors missing, surplus or mis-shaped."""
    if detect(path) == "converted":
        return _open_converted(path)
    source = open_source(path)
    plans = plan_leaves(source.config, source.tensors, source.rules, str(path))

    def leaves(dtype: DType) -> Iterator[tuple[str, NDArray[Any]]]:
        for plan in plans:
            yield plan.path, read_leaf(plan, dtype)

    return StoredModel(
        kind=source.kind,
        path=path,
        config=source.config,
        shapes={plan.path: plan.shape for plan in plans},
        files=source.files,
        leaves=leaves,
        gguf_metadata=source.gguf_metadata,
    )


def _open_converted(path: Path) -> StoredModel:
    config = read_own_config(path)
    wanted = converted_leaves(path, config)

    def leaves(dtype: DType) -> Iterator[tuple[str, NDArray[Any]]]:
        return read_leaves(path / PARAMS_NAME, converted_leaves(path, replace(config, dtype=dtype)))

    return StoredModel(
        kind="converted",
        path=path,
        config=config,
        shapes={name: leaf.shape for name, leaf in wanted.items()},
        files=(),
        leaves=leaves,
    )
