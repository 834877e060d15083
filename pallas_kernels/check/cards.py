"""The cards that can be compiled for: their limits, their speeds, and how XLA is told of them."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.config import Target


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU. Speeds are the maker's."""

    name: str
    device_kind: str
    """How JAX names the card."""
    capability: tuple[int, int]
    num_multiprocessors: int
    clock_ghz: float
    bandwidth: float
    """Of its memory, bytes a second."""
    matmul_rate: float
    """Operations of bfloat16 products a second, two for each multiplication."""
    memory_bytes: int
    l2_bytes: int
    fp32_lanes: int
    """Float32 units of a multiprocessor."""
    most_warps: int
    """Warps that are resident on a multiprocessor at once."""
    most_programs: int
    """Programs that are resident on a multiprocessor at once."""
    shared_bytes: int
    """Shared memory of a multiprocessor; a program may have 1 KiB less."""

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def target(self) -> Target:
        return Target(self.arch, self.num_multiprocessors)

    def description(self) -> str:
        """XLA's description of the card, as text, from which it can compile without one."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes}
  threads_per_core_limit: {self.most_warps * 32}
  core_count: {self.num_multiprocessors}
  fpus_per_core: {self.fp32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz:.3f}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_bytes - 1024}
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.device_kind}"
"""

    def resident_programs(self, *, registers: int, warps: int, shared_bytes: int) -> int:
        """Programs of a kernel that one multiprocessor holds at once.

        Registers are given out 256 a warp at a time, shared memory 128 bytes at a time and 1 KiB
        a program to the system (CUDA's occupancy calculator).
        """
        a_warp = -(-registers * 32 // 256) * 256
        by_registers = 65536 // a_warp // warps
        shared = -(-(shared_bytes + 1024) // 128) * 128
        limits = (
            by_registers,
            self.shared_bytes // shared,
            self.most_warps // warps,
            self.most_programs,
        )
        return min(limits)


CARDS = {
    "a10g": Card(
        "a10g",
        "NVIDIA A10",
        (8, 6),
        80,
        1.71,
        600e9,
        70e12,
        22_700_000_000,
        6 << 20,
        128,
        48,
        16,
        102400,
    ),
    "a100": Card(
        "a100",
        "NVIDIA A100",
        (8, 0),
        108,
        1.41,
        2039e9,
        312e12,
        84_900_000_000,
        40 << 20,
        64,
        64,
        32,
        167936,
    ),
    "h100": Card(
        "h100",
        "NVIDIA H100",
        (9, 0),
        132,
        1.98,
        3352e9,
        989e12,
        84_900_000_000,
        50 << 20,
        128,
        64,
        32,
        233472,
    ),
    "h200": Card(
        "h200",
        "NVIDIA H200",
        (9, 0),
        132,
        1.98,
        4800e9,
        989e12,
        150_000_000_000,
        60 << 20,
        128,
        64,
        32,
        233472,
    ),
}
