"""The KV pool's second home: blocks of preempted sequences in host memory.

A block leaves with one transfer for all that go in a step. The transfer runs behind the steps
that follow it; the host waits for it only when the blocks are wanted back, or more are to leave.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from jax import Array

from jaxpage.errors import CapacityError


class HostPool:
    """`num_blocks` blocks, each a `shape` of `dtype`; ids from 0. Pages come with the first use.

    Raises CapacityError for more than the host grants.
    """

    def __init__(self, num_blocks: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.block_shape, self.dtype = shape, dtype
        try:
            self._blocks = np.empty((num_blocks, *shape), dtype)
        except MemoryError as error:
            raise CapacityError(
                f"got {num_blocks} blocks to swap to ({error}), wanted what the host's memory "
                "holds; lower swap_blocks"
            ) from None
        self._arriving: list[tuple[list[int], Array]] = []

    def store(self, ids: Seq[int], blocks: Array) -> None:
        """Block i of `blocks` (more are padding) becomes host block `ids[i]`, when it arrives."""
        self._settle()
        blocks.copy_to_host_async()
        self._arriving.append((list(ids), blocks))

    def load(self, ids: Seq[int], out: np.ndarray) -> None:
        """Writes these blocks into `out`."""
        self._settle()
        out[:] = self._blocks[list(ids)]

    def forget(self) -> None:
        """Gives up the blocks that are on their way, as where they will never arrive."""
        self._arriving.clear()

    def _settle(self) -> None:
        while self._arriving:
            ids, blocks = self._arriving[0]
            self._blocks[ids] = np.asarray(blocks)[: len(ids)]
            self._arriving.pop(0)
