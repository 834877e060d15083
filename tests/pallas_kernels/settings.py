"""The settings that the attention kernels are tested under: what a program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.config import Tuning

Kind = Literal["decode", "prefill", "shared_prefix"]
SMALL = Tuning(
    block_k=16,
    query_rows=16,
    partition_tokens=32,
    max_partition_tokens=64,
    num_warps=4,
    num_stages=2,
)
"""Several tiles, parts and loop turns in a case that is small enough to interpret."""


@dataclass(frozen=True)
class Setting:
    """What a program is compiled for."""

    kind: Kind
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    dtype: str = "float32"
    kv_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    num_rows: int = 6
    most_tokens: int = 90
    """Of one row."""
    num_tokens: int = 40
    """Of a prefill call, padding included."""
    tuning: Tuning | None = SMALL

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def table_width(self) -> int:
        return -(-self.most_tokens // self.block_size) + 1


TALL = Tuning(16, 64, 32, 64, 4, 2)
SETTINGS = {
    "decode 7B": Setting("decode", group=1, head_dim=128, block_size=16, tuning=None),
    "decode SmolLM2 bf16": Setting("decode", group=3, num_kv_heads=3, dtype="bfloat16"),
    "decode 8B bf16": Setting("decode", group=4, head_dim=128, dtype="bfloat16", block_size=16),
    "decode group 8 f16": Setting("decode", group=8, dtype="float16", block_size=7),
    "decode group 9": Setting("decode", group=9, num_kv_heads=1, head_dim=80, block_size=1),
    "decode group 71": Setting("decode", group=71, num_kv_heads=1, block_size=5),
    "decode wide bf16": Setting("decode", group=2, head_dim=256, dtype="bfloat16"),
    "decode window": Setting("decode", group=3, head_dim=96, window=11),
    "decode cap": Setting("decode", group=4, soft_cap=0.7, block_size=3),
    "decode int8": Setting("decode", group=4, kv_dtype="int8"),
    "decode fp8 bf16": Setting(
        "decode", group=3, kv_dtype="float8_e4m3fn", dtype="bfloat16", head_dim=128
    ),
    "decode one row": Setting("decode", num_rows=1, group=4, most_tokens=300, tuning=None),
    "prefill 7B": Setting("prefill", group=1, head_dim=128, block_size=16, tuning=None),
    "prefill SmolLM2 bf16": Setting("prefill", group=3, num_kv_heads=3, dtype="bfloat16"),
    "prefill 8B bf16": Setting(
        "prefill", group=4, head_dim=128, dtype="bfloat16", block_size=16, tuning=TALL
    ),
    "prefill group 8 f16": Setting("prefill", group=8, dtype="float16", block_size=7),
    "prefill group 9": Setting("prefill", group=9, num_kv_heads=1, head_dim=80, block_size=1),
    "prefill group 71": Setting("prefill", group=71, num_kv_heads=1, block_size=5),
    "prefill wide": Setting("prefill", group=2, head_dim=256),
    "prefill window": Setting("prefill", group=3, head_dim=96, window=11, tuning=TALL),
    "prefill cap bf16": Setting("prefill", group=4, soft_cap=0.7, dtype="bfloat16"),
    "prefill int8 bf16": Setting("prefill", group=4, kv_dtype="int8", dtype="bfloat16"),
    "prefill fp8": Setting("prefill", group=3, kv_dtype="float8_e4m3fn", tuning=TALL),
    "prefix 7B": Setting("shared_prefix", group=1, head_dim=128, block_size=16, tuning=None),
    "prefix SmolLM2 bf16": Setting(
        "shared_prefix", group=3, num_kv_heads=3, dtype="bfloat16", tuning=TALL
    ),
    "prefix group 71": Setting("shared_prefix", group=71, num_kv_heads=1, block_size=5),
    "prefix window": Setting("shared_prefix", group=4, head_dim=96, window=40, tuning=TALL),
    "prefix cap bf16": Setting("shared_prefix", group=8, soft_cap=0.7, dtype="bfloat16"),
    "prefix int8": Setting("shared_prefix", group=2, kv_dtype="int8", block_size=7),
}


"""One row a program: groups, head dims, dtypes and options of every kind."""
DRAWS = 8
"""Of each setting: over 200 random ragged calls in all."""
