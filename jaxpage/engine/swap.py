"""Carries out a plan's block moves before its step: out to the host, in from it, copies.

Three kinds of program (copy, gather, scatter), each for a short ladder of sizes. The blocks that
leave in one step go in one transfer, which runs behind the steps that follow. The host waits for it
only when the blocks are wanted back, or more are to leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpage.device.kv_cache import apply_moves, gather_blocks, scatter_blocks
from jaxpage.device.placement import WHOLE, Placement
from jaxpage.device.types import KVCache
from jaxpage.engine.programs import Programs
from jaxpage.errors import CapacityError
from jaxpage.host.ladder import Ladder
from jaxpage.host.plan import BlockMoves

MOVES = Ladder((8, 64, 512))
Pairs = Seq[tuple[int, int]]


class BlockMover:
    """The moves of one engine; its programs are among `programs`."""

    def __init__(
        self,
        programs: Programs,
        cache: KVCache,
        placement: Placement,
        *,
        num_swap_blocks: int,
    ) -> None:
        self._placement = placement
        self._put = placement.put
        self._programs = programs
        self._cache_shape = placement.shapes(cache)
        pool = cache[0].k
        self._first_dead_block = pool.shape[0]
        shape = (len(cache), 2, *pool.shape[1:])  # (L, 2, S, K, H)
        self._host = HostPool(num_swap_blocks, shape, pool.dtype) if num_swap_blocks else None

    def prepare(self, moves: BlockMoves) -> None:
        """Compiles what these moves need, so that an interrupt hardly ever falls into `apply`."""
        for kind, pairs in (("out", moves.swap_out), ("in", moves.swap_in), ("copy", moves.copies)):
            for part in _parts(pairs):
                kinds = ("out", "in") if kind == "copy" and len(pairs) > len(part) else (kind,)
                for each in kinds:
                    self._program(each, MOVES.fit(len(part)))

    def apply(self, cache: KVCache, moves: BlockMoves) -> KVCache:
        """The pool after the moves; `cache` is donated."""
        for part in _parts(moves.swap_out):
            assert self._host is not None, "blocks to swap and no host pool"
            self._host.store([host for _, host in part], self._gathered(cache, part))
        for part in _parts(moves.swap_in):
            assert self._host is not None, "blocks to swap and no host pool"
            blocks = np.zeros((MOVES.fit(len(part)), *self._host.block_shape), self._host.dtype)
            self._host.load([host for host, _ in part], out=blocks[: len(part)])
            cache = self._scattered(cache, self._put(blocks), part)
        parts = list(_parts(moves.copies))
        if len(parts) == 1:
            ids = self._put((self._sources(parts[0]), self._destinations(parts[0])))
            return self._program("copy", ids[0].size)(cache, *ids)
        # More moves than one program takes: all are read before any is written.
        gathered = [self._gathered(cache, part) for part in parts]
        for part, blocks in zip(parts, gathered, strict=True):
            cache = self._scattered(cache, blocks, part)
        return cache

    def forget(self) -> None:
        """Gives up the blocks that are on their way to the host."""
        if self._host is not None:
            self._host.forget()

    def _gathered(self, cache: KVCache, pairs: Pairs) -> Array:
        ids = self._sources(pairs)
        return self._program("out", ids.size)(cache, self._put(ids))

    def _scattered(self, cache: KVCache, blocks: Array, pairs: Pairs) -> KVCache:
        ids = self._destinations(pairs)
        return self._program("in", ids.size)(cache, blocks, self._put(ids))

    def _sources(self, pairs: Pairs) -> np.ndarray:
        """Padding reads the null block."""
        ids = np.zeros(MOVES.fit(len(pairs)), np.int32)
        ids[: len(pairs)] = [source for source, _ in pairs]
        return ids

    def _destinations(self, pairs: Pairs) -> np.ndarray:
        """Padding writes beyond the pool."""
        ids = self._first_dead_block + np.arange(MOVES.fit(len(pairs)), dtype=np.int32)
        ids[: len(pairs)] = [destination for _, destination in pairs]
        return ids

    def _program(self, kind: str, size: int) -> Any:
        name = {"out": "swap out", "in": "swap in", "copy": "copies"}[kind] + f" of {size} blocks"
        return self._programs.get(("moves", kind, size), name, partial(self._lower, kind, size))

    def _lower(self, kind: str, size: int) -> jax.stages.Lowered:
        cache, ids = self._cache_shape, self._placement.shape((size,), jnp.int32)
        if kind == "out":
            return jax.jit(gather_blocks, **self._placement.outputs(WHOLE)).lower(cache, ids)
        where = self._placement.outputs(self._placement.pool)
        if kind == "copy":
            return jax.jit(apply_moves, donate_argnums=0, **where).lower(cache, ids, ids)
        blocks = self._placement.shapes(jax.eval_shape(gather_blocks, cache, ids))
        return jax.jit(scatter_blocks, donate_argnums=0, **where).lower(cache, blocks, ids)


class HostPool:
    """Blocks of preempted sequences in host memory: `num_blocks`, each a `shape` (L, 2, S, K, H).

    Ids count from 0; memory pages come with the first use. Raises CapacityError for more than the
    host grants.
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
        self._keep_arrived()
        blocks.copy_to_host_async()
        self._arriving.append((list(ids), blocks))

    def load(self, ids: Seq[int], out: np.ndarray) -> None:
        """Writes these blocks into `out`."""
        self._keep_arrived()
        out[:] = self._blocks[list(ids)]

    def forget(self) -> None:
        """Gives up the blocks that are on their way: after a failed step they may never arrive."""
        self._arriving.clear()

    def _keep_arrived(self) -> None:
        """Waits for the blocks that are on their way, and stores them."""
        while self._arriving:
            ids, blocks = self._arriving[0]
            self._blocks[ids] = np.asarray(blocks)[: len(ids)]
            self._arriving.pop(0)


def _parts(pairs: Pairs) -> Iterator[Pairs]:
    """The moves in parts that one program takes."""
    most = MOVES.sizes[-1]
    return (pairs[start : start + most] for start in range(0, len(pairs), most))
