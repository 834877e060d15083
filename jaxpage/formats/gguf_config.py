"""GGUF metadata -> ModelConfig.

As in hf_config every key of the architecture is used, checked, known to be harmless, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpage.config import MOST_LAYERS, ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.fields import Fields, short, words
from jaxpage.formats.gguf_io import GgufFile
from jaxpage.models.registry import names_in, stored_as
from jaxpage.tokenizers.gguf import special_id

_USED = words(
    "vocab_size context_length embedding_length block_count feed_forward_length "
    "rope.dimension_count attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length attention.layer_norm_rms_epsilon attention.sliding_window "
    "rope.freq_base rope.scaling.type rope.scaling.factor rope.scale_linear "
    "rope.scaling.original_context_length"
)
_CHECKED: dict[str, tuple[tuple[Any, ...], str]] = {
    "expert_count": ((0,), "mixtures of experts are not implemented"),
    "expert_used_count": ((0,), "mixtures of experts are not implemented"),
    "attention.causal": ((True,), "only causal attention is implemented"),
    "tensor_data_layout": (("Meta AI original pth",), "other layouts are not known"),
    "rope.scaling.type": (("none", "linear"), "other rotary stretching is not implemented"),
}
_HARMLESS = frozenset(("rope.scaling.finetuned", "use_parallel_residual"))
_ENDS = ("eos", "eot", "eom")
_ROPE_FREQS = "rope_freqs.weight"
# Every published Llama 3.1 to 3.3 uses these; other values are fitted.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The model's config; CheckpointError names the key that is missing, wrong or unknown."""
    source = str(file.path)
    architecture = file.metadata.get("general.architecture")
    family = stored_as("gguf", architecture)
    if family is None:
        raise CheckpointError(
            f"got architecture {short(architecture)} in {source}, wanted "
            f"{' or '.join(map(repr, names_in('gguf')))}; other models are not implemented"
        )
    layout = family.layouts["gguf"]
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"got {source}, one of {short(file.metadata['split.count'])} parts of a model, wanted "
            "a whole file; join the parts with llama.cpp's gguf-split --merge"
        )
    fields = _under(f"{architecture}.", file)
    fields.refuse_unknown(_USED | _CHECKED.keys() | _HARMLESS | layout.keys)
    for key, (allowed, why) in _CHECKED.items():
        if key not in layout.keys:
            fields.fixed(key, allowed, why)
    try:
        config = layout.read(fields, _settings(fields, file, layout.defaults))
    except ConfigError as error:
        raise CheckpointError(f"{error} ({source})") from None
    return replace(config, architecture=family.name)


def _under(prefix: str, file: GgufFile) -> Fields:
    """The keys that begin with a prefix, without it."""
    values = {
        key.removeprefix(prefix): file.metadata[key]
        for key in file.metadata
        if key.startswith(prefix)
    }
    return Fields(values, str(file.path))


def _settings(fields: Fields, file: GgufFile, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ModelConfig that the file of any decoder states."""
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    size = fields.head_dim("attention.key_length", hidden_size, num_heads)
    fields.fixed("attention.value_length", (size,), "keys and values are of one size")
    fields.fixed("rope.dimension_count", (size,), "partial rotary is not implemented")
    theta = fields.number("rope.freq_base", defaults.get("rope.freq_base", 10000.0))
    scaling, max_positions = _rope_scaling(fields, file, theta, size)
    window = "attention.sliding_window"
    vocab_size = _vocab_size(fields, file)
    bos, *ends = (
        special_id(file.metadata, name, vocab_size, source=file.path) for name in ("bos", *_ENDS)
    )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count", most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": size,
        "max_position_embeddings": max_positions,
        # float32 in the file: 9.999999747378752e-06 was written as 1e-05.
        "rms_norm_eps": _shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": fields.integer(window) if fields.has(window) else None,
        "bos_token_id": bos,
        "eos_token_ids": tuple(dict.fromkeys(end for end in ends if end is not None)),
        "dtype": file.stored_dtype,
    }


def _vocab_size(fields: Fields, file: GgufFile) -> int:
    """Rows of the embedding: the key `vocab_size` may be missing, or not count padding rows."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        return fields.integer("vocab_size")
    return embedding.shape[0]


def _rope_scaling(
    fields: Fields, file: GgufFile, theta: float, size: int
) -> tuple[RopeScaling | None, int]:
    """(scaling, longest length in tokens)."""
    length = fields.positions("context_length")
    if _ROPE_FREQS in file.tensors:
        factors = file.tensors[_ROPE_FREQS].read().astype(np.float64)
        return _llama3_from_table(factors, theta, size, fields.source), length
    factor_key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    if fields.values.get("rope.scaling.type") == "none" or not fields.has(factor_key):
        return None, length
    factor = fields.number(factor_key)
    if factor == 1:
        return None, length
    if fields.has("rope.scaling.original_context_length"):
        original = fields.positions("rope.scaling.original_context_length")
        return RopeScaling("linear", factor, original), length
    # llama.cpp's converter copies Hugging Face's unstretched length.
    return RopeScaling("linear", factor, length), fields.stretched(factor_key, length, factor)


def _llama3_from_table(
    factors: NDArray[np.float64], theta: float, size: int, source: str
) -> RopeScaling | None:
    """The llama3 rule that made a `rope_freqs` table of frequency divisors [H / 2]."""
    if factors.shape != (size // 2,) or not np.isfinite(factors).all() or factors.min() <= 0:
        raise CheckpointError(
            f"got {_ROPE_FREQS} of shape {list(factors.shape)} in {source}, wanted {size // 2} "
            "numbers above 0; convert the model again"
        )
    if np.allclose(factors, 1):
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    factor = round(float(factors.max()), 4)
    usual = RopeScaling("llama3", factor, _LLAMA3_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH)
    for guess in (usual, _fit_llama3(factors, wavelengths, factor)):
        if guess and np.allclose(_llama3_table(guess, wavelengths), factors, rtol=1e-4):
            return guess
    raise CheckpointError(
        f"got a {_ROPE_FREQS} in {source} that follows no llama3 rule, wanted one that does; "
        "other rotary stretching is not implemented"
    )


def _llama3_table(rule: RopeScaling, wavelengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Frequency divisors of a rule. Source: `modeling_rope_utils.py` of transformers."""
    turns = rule.original_max_position_embeddings / wavelengths
    width = rule.high_freq_factor - rule.low_freq_factor
    smooth = np.clip((turns - rule.low_freq_factor) / width, 0, 1)
    return 1 / ((1 - smooth) / rule.factor + smooth)


def _fit_llama3(
    factors: NDArray[np.float64], wavelengths: NDArray[np.float64], factor: float
) -> RopeScaling | None:
    """Solve for length and high_freq_factor from the divisors inside the ramp.

    On the ramp smooth = length / (high - low) / wavelength - low / (high - low), a straight line;
    only ratios to low_freq_factor matter, so it is set to 1. A single divisor does not determine
    both: then high_freq_factor is the usual one.
    """
    inside = np.flatnonzero((factors > 1.001) & (factors < factor * 0.999))
    if not len(inside):
        return None
    first, last = inside[0], inside[-1]
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    if first == last:
        turns = _LLAMA3_LOW + float(smooth[first]) * (_LLAMA3_HIGH - _LLAMA3_LOW)
        length, high = turns * float(wavelengths[first]), _LLAMA3_HIGH
    else:
        rise = float(smooth[first] - smooth[last])
        slope = rise / float(1 / wavelengths[first] - 1 / wavelengths[last])
        offset = float(smooth[first]) - slope / float(wavelengths[first])
        if slope <= 0 or offset >= 0:
            return None
        length, high = slope / -offset, 1 - 1 / offset
    return RopeScaling("llama3", factor, max(round(length), 1), 1.0, round(high, 4))


def _shortest(value: float) -> float:
    """The number with the fewest decimal digits that is the same in float32."""
    return float(str(np.float32(value)))
