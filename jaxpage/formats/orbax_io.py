"""Our parameter tree as an Orbax checkpoint: written leaf by leaf, read whole or by the leaf.

Orbax's partial saves append to one checkpoint, so that a model never has to be in memory at once.
Knows paths and shapes; not the config, nor the other files of a converted directory.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxpage.errors import CheckpointError, JaxpageError
from jaxpage.formats.tree import flatten, nest
from jaxpage.reading import MOST_JSON_BYTES, reading, reason

# Each save or read costs tens of milliseconds, however small, and memory for its bytes.
_BATCH_BYTES = 16 * 2**20
# Weights hardly compress: arrays this many times larger than their files are not a model's.
_MOST_PACKING = 100
_DATA = "d"
"""The name of directories with the bytes of arrays; beside them are lists of the arrays."""
Sized = TypeVar("Sized", jax.ShapeDtypeStruct, NDArray[Any])


def save_leaves(directory: Path, leaves: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write (path, array) pairs as one checkpoint in `directory`, which must not exist."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Weights hardly compress, and unpacking them is most of a load.
    context.array.saving.use_compression = False
    # Each save ends before the next leaf is made, so nothing can change under it.
    context.memory.deepcopy_host_arrays = False
    with context, _written(directory):
        for batch in _batches(leaves):
            ocp.partial.save(_address(directory), nest(batch))
        ocp.partial.finalize(_address(directory))


def stored_leaves(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf by its path; CheckpointError for a damaged checkpoint."""
    from orbax.checkpoint import v1 as ocp

    with _readable(directory):
        most_bytes = _MOST_PACKING * _bytes_on_disk(directory)
        tree = ocp.metadata(_address(directory)).metadata
        if not isinstance(tree, Mapping):
            raise ValueError("its list of arrays cannot be read")
        leaves = {
            path: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
            for path, leaf in flatten(tree).items()
        }
        claimed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
        if claimed > most_bytes:
            raise ValueError(f"it claims {claimed} bytes of arrays and has no files of that size")
        return leaves


def read_leaves(
    directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The leaves of `wanted` one after another, cast to its dtypes.

    Each is whole, however it was cut over devices when saved. Reading into NumPy takes less time
    and less than a third of the memory of Orbax's own way to a device.
    """
    from orbax.checkpoint import v1 as ocp

    for group in _batches(wanted.items()):
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        # Nothing is written to these, so they take no memory.
        like = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in group.items()}
        with _readable(directory), context:
            loaded = flatten(ocp.load(_address(directory), nest(like)))
        for path in group:
            yield path, loaded.pop(path)


def _bytes_on_disk(directory: Path) -> int:
    """Bytes of the files of a checkpoint; ValueError for one that Orbax must not open."""
    total = 0
    for path in directory.rglob("*"):
        if not path.is_dir() and not path.is_file():
            raise ValueError(f"{path.name} in it is no regular file")
        size = path.stat().st_size
        # Orbax reads these whole, and TensorStore ends the process when memory runs out.
        if path.is_file() and path.parent.name != _DATA and size > MOST_JSON_BYTES:
            raise ValueError(f"{path.name} in it has {size} bytes")
        total += size
    return total


def _address(directory: Path) -> str:
    """The absolute path: for a relative one Orbax warns, and returns None as metadata."""
    return str(directory.absolute())


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turns what Orbax raises for damaged files into one line."""
    with _hushed(), reading(directory, "a whole Orbax checkpoint"):
        yield


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """Turns what Orbax raises for a full disk or one that can't be written into one line."""
    try:
        with _hushed():
            yield
    except JaxpageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"got {directory} that Orbax can't write ({reason(error)}), wanted room and permission "
            "for it; free some space or write elsewhere"
        ) from error


@contextmanager
def _hushed() -> Iterator[None]:
    """Keeps Orbax from logging what it raises too.

    After a failure, tasks that Orbax gave up still report, from its own threads and when Python
    collects them; so after a failure the filters stay.
    """
    orbax, asyncio = logging.getLogger("absl"), logging.getLogger("asyncio")
    level, hook = orbax.level, sys.unraisablehook
    orbax.setLevel(logging.CRITICAL)
    asyncio.addFilter(_is_of_interest)
    if not isinstance(hook, _Quiet):
        sys.unraisablehook = _Quiet(hook)
    try:
        yield
        asyncio.removeFilter(_is_of_interest)
        sys.unraisablehook = hook
    finally:
        orbax.setLevel(level)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


@dataclass(frozen=True, slots=True)
class _Quiet:
    """An unraisable hook that ignores errors of an event loop that is closed."""

    hook: Callable[[Any], Any]

    def __call__(self, raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            self.hook(raised)


def _batches(
    leaves: Iterable[tuple[str, Sized]],
) -> Iterator[dict[str, Sized]]:
    """Leaves in groups of at most _BATCH_BYTES, or of one."""
    batch: dict[str, Sized] = {}
    size = 0
    for path, leaf in leaves:
        num_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if batch and size + num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[path] = leaf
        size += num_bytes
    if batch:
        yield batch
