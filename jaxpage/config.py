"""Frozen settings: what the model is, how the KV pool is cut, how the engine runs.

Standard library only, so that the host side stays importable without JAX or NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpage.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
DEFAULT_MODEL = "smollm2-135m"
"""What is loaded where no model is named."""
RopeKind = Literal["linear", "dynamic", "llama3"]
MOST_LAYERS = 10_000
MOST_POSITIONS = 2**24
"""Tokens; the longest model known has 10,485,760, and tables are as wide as what is allowed."""
MOST_END_IDS = 1024
NULL_BLOCK = 0
"""The block of the KV pool that padding reads; never allocated, never counted."""
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length a model was trained on.

    Source of the three rules: `modeling_rope_utils.py` of Hugging Face transformers.
    """

    kind: RopeKind
    factor: float
    original_max_position_embeddings: int
    """Length in tokens before stretching; used by `dynamic` and `llama3`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the attention of one layer computes, beside its arrays."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """A query at position p sees keys at positions p - window + 1 .. p; None: all up to p."""
    soft_cap: float | None = None
    """A score s becomes soft_cap * tanh(s / soft_cap), as in Gemma 2; None: scores stay."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with RMS norm, rotary positions, grouped queries and SwiGLU, as LLaMA is.

    A model family with more settings extends it (`jaxpage.models.family`).
    """

    vocab_size: int
    """Rows of the embedding; a padded vocabulary has more rows than the tokenizer has ids."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the q, k, v and output projections."""
    mlp_bias: bool = False
    sliding_window: int | None = None
    """A query at position p sees keys at positions > p - sliding_window; None sees all."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: DType = "float32"
    """dtype of the stored weights; activations follow it, norms and softmax are float32."""
    architecture: str = "llama"
    """The name of its family, a key of `jaxpage.models.registry.FAMILIES`."""

    def __post_init__(self) -> None:
        limits = {"num_layers": MOST_LAYERS, "max_position_embeddings": MOST_POSITIONS}
        for name, most in limits.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"got {name}={getattr(self, name)}, wanted at most {most}; check the model's "
                    "config"
                )
        if len(self.eos_token_ids) > MOST_END_IDS:
            raise ConfigError(
                f"got {len(self.eos_token_ids)} end ids, wanted at most {MOST_END_IDS}; check the "
                "model's config"
            )
        for token_id in (self.bos_token_id or 0, *self.eos_token_ids):
            if not 0 <= token_id <= _MOST_INT32:
                raise ConfigError(
                    f"got the token id {token_id}, wanted one from 0 to {_MOST_INT32}; check the "
                    "model's config"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"got num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads}, wanted a "
                "whole number of query heads per KV head; check the model's config"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def attention_spec(self, layer: int) -> AttentionSpec:
        """What the attention of a layer, counted from 0, computes: here all layers are alike."""
        return AttentionSpec(scale=self.head_dim**-0.5, window=self.sliding_window)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the KV pool is cut. `num_blocks` does not count NULL_BLOCK."""

    num_blocks: int
    block_size: int = 16
    num_swap_blocks: int = 0
    """Blocks of the host's own pool, where preempted sequences may wait; ids from 0."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"got {name}={getattr(self, name)}, wanted at least 1; raise {name}"
                )
        if self.num_swap_blocks < 0:
            raise ConfigError(
                f"got num_swap_blocks={self.num_swap_blocks}, wanted at least 0; raise it"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The limits of one engine; every field has its final value, none means "find out"."""

    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    max_num_seqs: int = 64
    """Most rows of one decode step."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one step, unless so many rows decode that none would be left for prompts."""
    max_prefill_rows: int = 8
    """Most rows of one prefill step; the row count every prefill program is compiled for."""
    enable_prefix_caching: bool = True
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """`auto` is the cheaper of the two by bytes against tokens; recompute without swap blocks."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"got {name}={getattr(self, name)}, wanted at least 1; raise {name}"
                )
