"""How many blocks the pool gets: the number given, or what fits."""

from __future__ import annotations

import math
import re
from typing import Any

import jax

from jaxpage.config import CacheConfig, ModelConfig
from jaxpage.device.kv_cache import block_bytes
from jaxpage.errors import CapacityError, ConfigError
from jaxpage.host.policy import PreemptionCosts
from jaxpage.memory import free_bytes
from jaxpage.terms import default_device

CPU_DEFAULT_BYTES = 1 << 30
CPU_SHARE = 0.25
"""Most of the free host memory that the default pool takes on a CPU."""
GPU_SHARE = 0.85
"""Most of the free device memory that the default pool takes; the rest is for temporaries."""
CPU_BYTES_PER_S = 4e9
"""Of moving a block between two arrays of one memory."""
CPU_OPERATIONS_PER_S = 1e11
GPU_OPERATIONS_PER_S = 1.4e14
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes of '2GiB', '512 MiB', '1e9' or a number; K, M, G, T are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE]\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text))
    try:
        number = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 0 < number < math.inf:
        raise ConfigError(
            f"got kv_memory={text!r}, wanted a size such as 512MiB or 2GiB; change it"
        )
    return int(number)


def size_pool(
    config: ModelConfig,
    *,
    block_size: int,
    num_blocks: int | None,
    kv_memory: str | int | None,
    most_tokens: int,
    num_swap_blocks: int | None = 0,
) -> CacheConfig:
    """The pool's cut. `most_tokens`: what all sequences together could ever hold.
    `num_swap_blocks`: None is as many as the pool has; host memory is taken as they are used.

    Raises ConfigError for a contradiction, CapacityError when it can't fit the memory there is.
    """
    if num_blocks is not None and kv_memory is not None:
        raise ConfigError(
            f"got num_blocks={num_blocks} and kv_memory={kv_memory!r}, wanted one; leave one out"
        )
    per_block = block_bytes(config, block_size)
    free = free_bytes()
    if num_blocks is None:
        budget = _default_budget(free) if kv_memory is None else parse_bytes(kv_memory)
        num_blocks = budget // per_block - 1  # the null block is in the budget too
        if kv_memory is None:
            num_blocks = min(num_blocks, -(-most_tokens // block_size))
    need = (num_blocks + 1) * per_block
    if num_blocks < 1 or (free is not None and need > free):
        have = "unknown" if free is None else f"{free / 2**20:.0f} MiB"
        raise CapacityError(
            f"got a KV pool of {num_blocks} blocks of {per_block / 2**20:.3f} MiB = "
            f"{need / 2**20:.0f} MiB, wanted at least 1 block and at most the free memory "
            f"({have}); change num_blocks or kv_memory"
        )
    if num_swap_blocks is None:
        num_swap_blocks = num_blocks
    return CacheConfig(
        num_blocks=num_blocks, block_size=block_size, num_swap_blocks=num_swap_blocks
    )


def preemption_costs(config: ModelConfig, params: Any, *, block_size: int) -> PreemptionCosts:
    """What swapping and recomputing cost here, to the order of magnitude."""
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    is_cpu = default_device().platform == "cpu"
    operations_per_s = CPU_OPERATIONS_PER_S if is_cpu else GPU_OPERATIONS_PER_S
    return PreemptionCosts(
        block_bytes=block_bytes(config, block_size),
        link_bytes_per_s=CPU_BYTES_PER_S if is_cpu else PreemptionCosts().link_bytes_per_s,
        seconds_per_token=2 * num_params / operations_per_s,
    )


def _default_budget(free: int | None) -> int:
    if default_device().platform != "cpu":
        return int((free or 0) * GPU_SHARE)
    return CPU_DEFAULT_BYTES if free is None else min(CPU_DEFAULT_BYTES, int(free * CPU_SHARE))
