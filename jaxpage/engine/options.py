"""The options that the library and the command line share, checked in one place."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from jaxpage.backends import BACKENDS, as_backend, default_backend
from jaxpage.config import DTYPES, DType, EngineConfig, ModelConfig
from jaxpage.device.ops import Backend
from jaxpage.engine.step_shapes import SMALLEST_PREFILL_TOKENS
from jaxpage.errors import ConfigError
from jaxpage.sampling_params import MAX_SEED
from jaxpage.terms import default_device
from jaxpage.unsupported import comes_later

logger = logging.getLogger(__name__)

MOST = 2**31 - 1
"""Most of anything that the device counts: its integers have 32 bits."""
MOST_ROWS = 2**16
"""Most sequences of a step, far more than any device decodes at once."""
MOST_PREFILL_ROWS = SMALLEST_PREFILL_TOKENS - 1
"""Prompts of a step; those beyond it take another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Keywords of `LLM`. Where a value is None, what fits is chosen."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    block_size: int = 16
    num_blocks: int | None = None
    """Blocks in the pool; or give kv_memory ("2GiB"); or neither: what fits, bounded on a CPU."""
    kv_memory: str | int | None = None
    max_model_len: int | None = None
    """Most tokens of a sequence; None: what the model was made for."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    """Whether prompts share the blocks of an equal beginning, also after their requests end."""
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """How a request gives way when blocks run out. auto: the cheaper of the two."""
    swap_blocks: int | None = None
    """Blocks in host memory to swap to; without any, all recompute. None: as many as the pool has
    where preemption is swap, else none."""
    shared_prefix_decode: bool = True
    """Whether rows of a step that share leading blocks read those once, where that pays."""
    attention: Literal["auto", "xla", "native", "reference", "pallas"] | Backend = "auto"
    """What computes: a backend by name, the products of the model too, or one of your own.
    auto: pallas on a GPU, native on a CPU where it is built, else xla."""
    tensor_parallel_size: int = 1
    seed: int | None = None
    """Starts the stream that requests without a seed of their own use; None: a random one."""

    def checked(self) -> EngineOptions:
        """These options; ConfigError for a value out of range or a feature of a later version."""
        _choice("dtype", self.dtype, ("auto", *DTYPES))
        _choice("preemption", self.preemption, ("auto", "recompute", "swap"))
        if isinstance(self.attention, str):
            _choice("attention", self.attention, ("auto", *BACKENDS))
        else:
            as_backend(self.attention)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _whole(name, getattr(self, name), 1, MOST_ROWS if name == "max_num_seqs" else MOST)
        for name, least in (("num_blocks", 1), ("max_model_len", 1), ("swap_blocks", 0)):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least, MOST)
        for name in ("enable_prefix_caching", "shared_prefix_decode"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"got {name}={getattr(self, name)!r}, wanted True or False; choose one"
                )
        if not (self.shared_prefix_decode or isinstance(self.attention, str)):
            raise ConfigError(
                "got shared_prefix_decode=False beside a backend of your own, wanted one or the "
                "other; make a backend that shares none"
            )
        if self.tensor_parallel_size != 1:
            raise comes_later(f"tensor_parallel_size={self.tensor_parallel_size}", "1")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        return self

    @property
    def num_swap_blocks(self) -> int | None:
        """None: as many as the pool will have."""
        if self.swap_blocks is None and self.preemption != "swap":
            return 0
        return self.swap_blocks

    def model_dtype(self) -> DType:
        """The dtype that the weights are loaded in."""
        if self.dtype == "auto":
            return "float32" if default_device().platform == "cpu" else "bfloat16"
        return self.dtype

    def backend(self) -> Backend:
        """What computes; where a faster one is missing, a line of notice says so."""
        name = self.attention
        if name == "auto":
            name, missing = default_backend(default_device().platform)
            if missing:
                logger.warning(missing)
        return as_backend(name, shares_prefixes=self.shared_prefix_decode)

    def engine_config(self, config: ModelConfig) -> EngineConfig:
        """The engine's limits for a model."""
        longest = self.max_model_len or config.max_position_embeddings
        if longest > config.max_position_embeddings and config.rope_scaling is None:
            raise ConfigError(
                f"got max_model_len={longest}, wanted at most {config.max_position_embeddings}, "
                "the length the model was made for; lower it"
            )
        fewest_tokens = min(SMALLEST_PREFILL_TOKENS, self.max_num_batched_tokens)
        return EngineConfig(
            max_model_len=longest,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            # fewer rows than the fewest tokens that a prefill is padded to
            max_prefill_rows=max(1, min(MOST_PREFILL_ROWS, self.max_num_seqs, fewest_tokens - 1)),
            enable_prefix_caching=self.enable_prefix_caching,
            preemption=self.preemption,
        )


def _choice(name: str, got: str, wanted: tuple[str, ...]) -> None:
    if got not in wanted:
        raise ConfigError(f"got {name}={got!r}, wanted one of {', '.join(wanted)}; choose one")


def _whole(name: str, got: object, least: int, most: int | None = None) -> None:
    if (
        not isinstance(got, int)
        or isinstance(got, bool)
        or got < least
        or (most is not None and got > most)
    ):
        until = "" if most is None else f" and at most {most}"
        raise ConfigError(
            f"got {name}={got!r}, wanted a whole number of at least {least}{until}; change {name}"
        )
