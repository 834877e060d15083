"""The roofline price of a step: everything modelled is priced here and labelled so.

seconds = max(bytes / bandwidth, FLOPs / peak) + kernels launched x launch time
bytes   = weights + KV read + KV written
FLOPs   = 2 x parameters x tokens + 4 x layers x width x (tokens attended to)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

GIB = 1 << 30
TRANSFER_S = 5e-6
"""Start of one copy between device and host, each of a block's K or V in one layer: assumed."""
SWAP_BLOCK_SIZES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Card:
    """A device's limits; decimal bytes, dense FLOPs."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    host_bytes_per_s: float
    """To and from the host's memory, one way."""
    dollars_per_hour: float
    source: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as its cost sees it, in 2-byte weights and KV."""

    name: str
    parameters: float
    layers: int
    width: int
    """Attention width: heads x head size."""
    kv_width: int
    kernels_per_layer: int = 12
    """Launched in a step: norms 2, QKV, rope, write, attention, output, MLP 3, sums 2."""

    @property
    def kv_bytes(self) -> int:
        """A token's keys and values in all layers."""
        return 2 * 2 * self.layers * self.kv_width

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


@dataclass(frozen=True, slots=True)
class StepCost:
    """Prices steps of one model on one card."""

    card: Card
    shape: Shape
    launch_s: float = 5e-6
    """A kernel's launch; an assumption, CUDA launches cost 3 to 10 us unless captured in graphs."""
    kv_passes: float = 1.0
    """Times the live KV is moved a step: 1 to read it; 3 for one who also copies it (concat)."""
    slowness: float = 1.0
    """Times the roofline that a step takes; 1 is a perfect kernel."""
    row_s: float = 0.0
    """Host and sampling, for each token drawn; 0 is a perfect host."""

    def seconds(
        self,
        *,
        tokens: int,
        context_tokens: float,
        attended: float,
        rows: int = 0,
        moved_bytes: float = 0.0,
    ) -> float:
        """One step.

        `tokens`: new ones, of prompts and rows; `context_tokens`: read from the cache;
        `attended`: pairs (new token, token it sees); `rows`: tokens drawn; `moved_bytes`: over
        the host link.
        """
        shape, card = self.shape, self.card
        kv = (context_tokens * self.kv_passes + tokens) * shape.kv_bytes
        flops = 2 * shape.parameters * tokens + 4 * shape.layers * shape.width * attended
        launches = shape.layers * shape.kernels_per_layer * self.launch_s
        work = max((shape.weight_bytes + kv) / card.bytes_per_s, flops / card.flops_per_s)
        moves = moved_bytes / card.host_bytes_per_s
        return self.slowness * (work + launches) + rows * self.row_s + moves

    def constants(self) -> dict[str, Any]:
        return asdict(self)


A100 = Card(
    name="A100-40GB",
    bytes_per_s=1555e9,
    flops_per_s=312e12,
    memory_bytes=40e9,
    host_bytes_per_s=25e9,
    dollars_per_hour=3.0,
    source="NVIDIA A100 datasheet: 1555 GB/s, 312 TFLOP/s bf16 dense, PCIe 4 x16; $3/h assumed",
)
A10G = Card(
    name="A10G",
    bytes_per_s=600e9,
    flops_per_s=70e12,
    memory_bytes=24e9,
    host_bytes_per_s=25e9,
    dollars_per_hour=1.0,
    source="NVIDIA A10G: 600 GB/s, 70 TFLOP/s bf16 dense, PCIe 4 x16; $1/h assumed (g5.xlarge)",
)
H200 = Card(
    name="H200",
    bytes_per_s=4800e9,
    flops_per_s=990e12,
    memory_bytes=141e9,
    host_bytes_per_s=55e9,
    dollars_per_hour=4.0,
    source="NVIDIA H200 datasheet: 4.8 TB/s, 990 TFLOP/s bf16 dense, PCIe 5 x16; $4/h assumed",
)

OPT_13B = Shape("OPT-13B", 13.0e9, 40, 5120, 5120)
LLAMA_7B = Shape("LLaMA-7B", 6.74e9, 32, 4096, 4096)
LLAMA_13B = Shape("LLaMA-13B", 13.0e9, 40, 5120, 5120)


@dataclass(frozen=True, slots=True)
class Site:
    """A model on a card, and what is left for its KV cache."""

    cost: StepCost
    kv_cache_bytes: float
    max_num_seqs: int = 256
    """Rows of a step: vLLM's limit at the time of the paper, more where memory holds more."""

    @property
    def name(self) -> str:
        return f"{self.cost.shape.name} on {self.cost.card.name}"

    @property
    def slots(self) -> int:
        """Token slots of the KV cache."""
        return int(self.kv_cache_bytes // self.cost.shape.kv_bytes)

    def constants(self) -> dict[str, Any]:
        return {**self.cost.constants(), "kv_cache_bytes": self.kv_cache_bytes, "slots": self.slots}


def fitted(card: Card, shape: Shape) -> Site:
    """What 90% of the memory leaves beside the weights and 1 GiB of activations."""
    room = 0.9 * card.memory_bytes - shape.weight_bytes - GIB
    return Site(StepCost(card, shape), room, 1024 if card.memory_bytes > 80e9 else 256)


def as_printed(site: Site) -> Site:
    """The site with steps as slow as the paper's own batches say.

    Batch = rate x time of a request (Little): 30.42 at 2 requests/s of 338 tokens is 45 ms a
    token, 132.44 at 30 requests/s of 58 is 75 ms, where the roofline has 27 and 25. The two
    numbers are fitted to these two batches with the counting twin and 12,000 requests; the second
    is near the knee, where a shorter trace ends before its queue has grown. It is for asking
    whether a deviation comes from a roofline's speed, never for a result.
    """
    return replace(site, cost=replace(site.cost, slowness=1.31, row_s=318e-6))


PAPER_SITE = Site(StepCost(A100, OPT_13B), 12 * GIB)
"""The paper's own arithmetic: 12 GiB of KV, 800 KiB a token, 15,728 slots."""
SITES = {
    "opt13b_a100": PAPER_SITE,
    "llama7b_a10g": fitted(A10G, LLAMA_7B),
    "llama13b_a100": Site(StepCost(A100, LLAMA_13B), 12 * GIB),
    "llama13b_h200": fitted(H200, LLAMA_13B),
}


def swap_or_recompute(site: Site) -> list[dict[str, Any]]:
    """Modelled milliseconds of bringing one sequence back, by length and block size."""
    shape, card, found = site.cost.shape, site.cost.card, []
    for tokens in (128, 512, 2048):
        row: dict[str, Any] = {"tokens": tokens}
        row["recompute_ms"] = 1e3 * site.cost.seconds(
            tokens=tokens, context_tokens=0, attended=tokens**2 / 2
        )
        for block_size in SWAP_BLOCK_SIZES:
            blocks = -(-tokens // block_size)
            moved = 2 * blocks * block_size * shape.kv_bytes  # out and in again
            transfers = 2 * blocks * shape.layers * 2
            seconds = moved / card.host_bytes_per_s + transfers * TRANSFER_S
            row[f"swap_{block_size}_ms"] = 1e3 * seconds
        found.append(row)
    return found
