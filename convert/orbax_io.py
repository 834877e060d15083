"""Our parameter tree as an Orbax checkpoint: written leaf by leaf, read whole or by the leaf.

Orbax's partial saves append to one checkpoint, so that a model never has to be in memory at once.
Knows paths and shapes; the config and the other files of a converted directory are not its
business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from convert.tree import flatten, nest
from jaxpage.errors import CheckpointError

# A save costs tens of milliseconds however small it is, and about its bytes in memory.
_BATCH_BYTES = 16 * 2**20


def save_leaves(directory: Path, leaves: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write (path, array) pairs as one checkpoint in `directory`, which must not exist."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Weights hardly compress, and unpacking them is most of a load.
    context.array.saving.use_compression = False
    # Each save ends before the next leaf is made, so nothing can change under it.
    context.memory.deepcopy_host_arrays = False
    with context:
        for batch in _batches(leaves):
            ocp.partial.save(str(directory), nest(batch))
        ocp.partial.finalize(str(directory))


def stored_leaves(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf by its path; CheckpointError for a damaged checkpoint."""
    from orbax.checkpoint import v1 as ocp

    with _readable(directory):
        tree = ocp.metadata(str(directory)).metadata
        if not isinstance(tree, Mapping):
            raise ValueError("its list of arrays cannot be read")
        return {
            path: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
            for path, leaf in flatten(tree).items()
        }


def load_leaves(
    directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The leaves of `wanted` by their paths, cast and laid out over devices as it says.

    A leaf without a sharding goes to the default device, however it was laid out when saved.
    """
    from orbax.checkpoint import v1 as ocp

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)
        for path, leaf in wanted.items()
    }
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with _readable(directory), context:
        return flatten(ocp.load(str(directory), nest(placed)))


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turn what Orbax raises and logs for damaged files into one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"got {directory}, wanted a whole Orbax checkpoint ({reason}); convert the model again"
        ) from None
    finally:
        logger.setLevel(level)


def _batches(leaves: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[dict[str, NDArray[Any]]]:
    """Leaves in groups of at most _BATCH_BYTES, or of one."""
    batch: dict[str, NDArray[Any]] = {}
    size = 0
    for path, leaf in leaves:
        if batch and size + leaf.nbytes > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[path] = leaf
        size += leaf.nbytes
    if batch:
        yield batch
