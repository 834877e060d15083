"""Mistral: Llama's layers with a sliding window. GGUF files call it a llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpage.config import ModelConfig
from jaxpage.fields import Fields
from jaxpage.models.families.llama import HF_LAYOUT, LLAMA


def _read(fields: Fields, settings: dict[str, Any]) -> ModelConfig:
    """The window is 4096 tokens if the file doesn't say; null means none."""
    window: int | None = 4096
    if "sliding_window" in fields.values:
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return ModelConfig(**settings, sliding_window=window)


def _write(config: ModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"sliding_window": config.sliding_window}


MISTRAL = replace(
    LLAMA,
    name="mistral",
    layouts={
        "huggingface": replace(
            HF_LAYOUT,
            names=("MistralForCausalLM",),
            read=_read,
            write=_write,
            # of transformers' MistralConfig
            defaults={
                **HF_LAYOUT.defaults,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
            },
        )
    },
)
