"""Paged-attention LLM inference in JAX.

Names are loaded on first use, so importing a part never loads JAX by accident.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_ROOMS = {
    "jaxpage.engine.llm": ("LLM",),
    "jaxpage.engine.engine": ("LLMEngine",),
    "jaxpage.engine.build": ("build",),
    "jaxpage.engine.options": ("EngineOptions",),
    "jaxpage.engine.sampling_inputs": ("Stage", "STAGES"),
    "jaxpage.sampling_params": ("SamplingParams", "BeamSearchParams"),
    "jaxpage.outputs": (
        "RequestOutput",
        "CompletionOutput",
        "RequestMetrics",
        "TokenLogprob",
        "EngineStats",
        "Update",
    ),
    "jaxpage.config": (
        "ModelConfig",
        "CacheConfig",
        "EngineConfig",
        "RopeScaling",
        "AttentionSpec",
    ),
    "jaxpage.weights": ("Quantized",),
    "jaxpage.device.placement": ("Placement",),
    "jaxpage.errors": (
        "JaxpageError",
        "ConfigError",
        "RequestError",
        "CapacityError",
        "CheckpointError",
    ),
    "jaxpage.checkpoint": ("load",),
    "jaxpage.models.registry": ("build_model", "init_params"),
    "jaxpage.device.kv_cache": ("init_cache",),
    "jaxpage.device.inputs": ("prefill_input", "decode_input"),
    "jaxpage.device.sampling.settings": ("sampling_input", "logit_edits", "draw_history"),
    "jaxpage.functional": ("forward", "prefill", "decode"),
    "jaxpage.device.sampling.sample": ("sample",),
    "jaxpage.device.types": ("StepInput", "DrawInput", "SamplingInput", "StepOutput"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  # one table, read by both

if TYPE_CHECKING:
    from jaxpage.checkpoint import load as load
    from jaxpage.config import AttentionSpec as AttentionSpec
    from jaxpage.config import CacheConfig as CacheConfig
    from jaxpage.config import EngineConfig as EngineConfig
    from jaxpage.config import ModelConfig as ModelConfig
    from jaxpage.config import RopeScaling as RopeScaling
    from jaxpage.device.inputs import decode_input as decode_input
    from jaxpage.device.inputs import prefill_input as prefill_input
    from jaxpage.device.kv_cache import init_cache as init_cache
    from jaxpage.device.placement import Placement as Placement
    from jaxpage.device.sampling.sample import sample as sample
    from jaxpage.device.sampling.settings import draw_history as draw_history
    from jaxpage.device.sampling.settings import logit_edits as logit_edits
    from jaxpage.device.sampling.settings import sampling_input as sampling_input
    from jaxpage.device.types import DrawInput as DrawInput
    from jaxpage.device.types import SamplingInput as SamplingInput
    from jaxpage.device.types import StepInput as StepInput
    from jaxpage.device.types import StepOutput as StepOutput
    from jaxpage.engine.build import build as build
    from jaxpage.engine.engine import LLMEngine as LLMEngine
    from jaxpage.engine.llm import LLM as LLM
    from jaxpage.engine.options import EngineOptions as EngineOptions
    from jaxpage.engine.sampling_inputs import STAGES as STAGES
    from jaxpage.engine.sampling_inputs import Stage as Stage
    from jaxpage.errors import CapacityError as CapacityError
    from jaxpage.errors import CheckpointError as CheckpointError
    from jaxpage.errors import ConfigError as ConfigError
    from jaxpage.errors import JaxpageError as JaxpageError
    from jaxpage.errors import RequestError as RequestError
    from jaxpage.functional import decode as decode
    from jaxpage.functional import forward as forward
    from jaxpage.functional import prefill as prefill
    from jaxpage.models.registry import build_model as build_model
    from jaxpage.models.registry import init_params as init_params
    from jaxpage.outputs import CompletionOutput as CompletionOutput
    from jaxpage.outputs import EngineStats as EngineStats
    from jaxpage.outputs import RequestMetrics as RequestMetrics
    from jaxpage.outputs import RequestOutput as RequestOutput
    from jaxpage.outputs import TokenLogprob as TokenLogprob
    from jaxpage.outputs import Update as Update
    from jaxpage.sampling_params import BeamSearchParams as BeamSearchParams
    from jaxpage.sampling_params import SamplingParams as SamplingParams
    from jaxpage.weights import Quantized as Quantized


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxpage' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
