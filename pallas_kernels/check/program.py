"""What is to be compiled: a function, the shapes it takes, and what must be true of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Inner:
    """What is expected of one kernel inside a program, and what one launch of it does."""

    tile_bytes: int
    """Bytes of K and V that one turn of its main loop reads, columns of padding included."""
    turns: int
    """Turns of that loop over all programs of a launch."""
    kv_bytes: int
    """Distinct bytes of K and V: what must come from memory."""
    operations: int
    """Of its matrix products, two for each multiplication."""
    num_stages: int
    """Turns whose reads are under way at once, the one being computed included."""
    is_quantised: bool = False
    needs_tensor_cores: bool = True
    min_occupancy: float = 0.25
    """Least share of a multiprocessor's warps that must be resident."""


@dataclass(frozen=True, slots=True)
class Program:
    """One function, compiled as a whole."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of jax.ShapeDtypeStruct (or of arrays)."""
    donated: tuple[int, ...] = ()
    kernels: Mapping[str, Inner] = field(default_factory=dict)
    """What is expected of its attention kernels, by the names that they were called with."""
    pools: tuple[jax.ShapeDtypeStruct, ...] = ()
    """The pool's arrays among the arguments. A program that donates them is held to updating them
    in place; no program may copy them."""
    weight_bytes: int = 0
    """Bytes of weights that one run reads, beside the KV of its kernels."""
    is_step: bool = False
    """A whole step: its pools must be updated in place, and all of it be one CUDA graph."""

    @property
    def pool_bytes(self) -> int:
        return sum(pool.size * pool.dtype.itemsize for pool in self.pools)


Programs = Callable[[Any], "list[Program]"]
"""Takes a Card, returns what to compile for it."""
