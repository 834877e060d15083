"""What this version does not do yet, and how it says so: an explicit request is a ConfigError.

Nothing half-works. When a feature arrives, its line here goes.
"""

from __future__ import annotations

from jaxpage.errors import ConfigError, RequestError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams


def comes_later(got: str, instead: str) -> ConfigError:
    """The error for something that a later version brings."""
    return ConfigError(f"got {got}, which comes with a later version; use {instead}")


def check_available(
    params: SamplingParams | BeamSearchParams,
) -> SamplingParams | BeamSearchParams:
    """The params; ConfigError if they need a feature that this version does not have."""
    if isinstance(params, BeamSearchParams):
        return params
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"got {type(params).__name__} as params, wanted SamplingParams or BeamSearchParams; "
            "pass one"
        )
    if params.logits_processors:
        raise comes_later("logits_processors", "none")
    return params
