"""Hugging Face `config.json` <-> ModelConfig.

Every key is used, checked, known to be harmless, or refused: an unknown key may change the
arithmetic. What every decoder has is read here; further keys, and the defaults of absent ones, are
in the family's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpage.config import MOST_LAYERS, ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.fields import Fields, short, words
from jaxpage.models.family import Family, Layout
from jaxpage.models.registry import FAMILIES, family_of, names_in, stored_as
from jaxpage.reading import MOST_SETTINGS_BYTES, read_json

_USED = words(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps "
    "rope_theta rope_scaling rope_parameters tie_word_embeddings attention_bias mlp_bias "
    "bos_token_id eos_token_id torch_dtype dtype"
)
# Key -> the values with which it changes nothing, and why any other is refused.
_CHECKED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish", None), "other activations are not implemented"),
    "partial_rotary_factor": ((1, 1.0, None), "partial rotary embeddings are not implemented"),
    "rope_interleaved": ((False, None), "interleaved rotary pairs are not implemented"),
    "quantization_config": ((None,), "quantised Hugging Face weights are not read"),
    "is_encoder_decoder": ((False,), "only decoders are implemented"),
    "add_cross_attention": ((False,), "cross attention is not implemented"),
    "layer_types": ((None,), "layers that attend in different ways are not implemented"),
    "use_sliding_window": ((True, None), "remove sliding_window instead"),
    "pruned_heads": (({}, None), "pruned heads are not implemented"),
}
_HARMLESS = words(
    "_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash "
    "_flash_attn_2_enabled attention_dropout attn_implementation chunk_size_feed_forward "
    "finetuning_task hidden_dropout id2label initializer_range is_decoder "
    "label2id license max_sequence_length name output_attentions output_hidden_states pad_token_id "
    "pretraining_tp problem_type return_dict tf_legacy_loss tokenizer_class torchscript "
    "transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version "
    "use_bfloat16 use_cache "
    # Settings of generation that old files keep here.
    "bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty "
    "max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate "
    "sep_token_id suppress_tokens task_specific_params temperature tie_encoder_decoder top_k top_p "
    "typical_p"
)
_ROPE_KEYS = words(
    "type rope_type factor rope_theta original_max_position_embeddings low_freq_factor "
    "high_freq_factor partial_rotary_factor"
)


def read_hf_config(directory: Path) -> ModelConfig:
    """`config.json` and `generation_config.json` of a directory as a ModelConfig."""
    path, generation = directory / "config.json", directory / "generation_config.json"
    stops = read_json(generation, most=MOST_SETTINGS_BYTES) if generation.exists() else {}
    return parse_hf_config(read_json(path, most=MOST_SETTINGS_BYTES), stops, str(path))


def parse_hf_config(values: dict[str, Any], generation: dict[str, Any], source: str) -> ModelConfig:
    """A ModelConfig; CheckpointError names the key that is missing, wrong or unknown."""
    fields = Fields(values, source)
    family = _family(fields)
    layout = family.layouts["huggingface"]
    fields.refuse_unknown(_USED | _CHECKED.keys() | _HARMLESS | layout.keys)
    for key, (allowed, why) in _CHECKED.items():
        if key not in layout.keys:
            fields.fixed(key, allowed, why)
    stops = Fields(generation, source.replace("config.json", "generation_config.json"))
    try:
        config = layout.read(fields, _settings(fields, stops, layout.defaults))
    except ConfigError as error:
        raise CheckpointError(f"{error} ({source})") from None
    return replace(config, architecture=family.name)


def hf_layout(config: ModelConfig) -> Layout:
    """How Hugging Face's files store the config's family; CheckpointError if they can't."""
    family = family_of(config)
    if "huggingface" not in family.layouts:
        raise CheckpointError(
            f"got a model of the family {family.name}, wanted one that Hugging Face's files can "
            "hold; convert it to an Orbax checkpoint"
        )
    return family.layouts["huggingface"]


def write_generation_config(config: ModelConfig) -> dict[str, Any]:
    """What `generation_config.json` says of the model itself."""
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos}


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of `config.json`: the inverse of reading it."""
    layout = hf_layout(config)
    values: dict[str, Any] = {
        "architectures": [layout.names[0]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        **write_generation_config(config),
        "torch_dtype": config.dtype,
    }
    scaling = config.rope_scaling
    if scaling is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            values["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        else:
            values["max_position_embeddings"] = scaling.original_max_position_embeddings
    if layout.write is None:
        raise CheckpointError(
            f"got a model of the family {config.architecture}, whose layout has no way to write "
            "config.json, wanted one that has; convert it to an Orbax checkpoint"
        )
    return layout.write(config, values)


def _family(fields: Fields) -> Family:
    names, kind = fields.values.get("architectures"), fields.values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) and not names else None
    if family is not None and "huggingface" in family.layouts:
        return family
    name = names[0] if isinstance(names, list) and names else names
    family = stored_as("huggingface", name)
    if family is None:
        raise CheckpointError(
            f"got architecture {short(name)} (model_type {short(kind)}) in {fields.source}, wanted "
            f"one of {', '.join(names_in('huggingface'))}; other models are not implemented"
        )
    return family


def _settings(fields: Fields, stops: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ModelConfig that every decoder's config.json states."""
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    theta, scaling, max_positions = _rope(fields, defaults)
    # transformers uses only generation_config's; some chat models name another end in each file.
    eos = stops.token_ids("eos_token_id")
    eos += fields.token_ids("eos_token_id", None if eos else defaults.get("eos_token_id"))
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer(
            "num_key_value_heads", defaults.get("num_key_value_heads", num_heads)
        ),
        "head_dim": fields.head_dim("head_dim", hidden_size, num_heads),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": fields.number("rms_norm_eps", defaults.get("rms_norm_eps")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": fields.flag(
            "tie_word_embeddings", defaults.get("tie_word_embeddings", False)
        ),
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "bos_token_id": fields.token_id("bos_token_id", defaults.get("bos_token_id")),
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "dtype": fields.dtype("dtype", "torch_dtype"),
    }


def _rope(fields: Fields, defaults: Mapping[str, Any]) -> tuple[float, RopeScaling | None, int]:
    """(theta, scaling, longest length): `linear` and `dynamic` files state the unstretched length.

    The stretched length is then factor times as long, as in vLLM; transformers states none.
    """
    positions = fields.positions("max_position_embeddings", defaults.get("max_position_embeddings"))
    raw = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise fields.wrong("rope_scaling", raw, "an object or null")
    rope = Fields(raw, f"rope_scaling of {fields.source}")
    rope.refuse_unknown(_ROPE_KEYS)
    rope.fixed("partial_rotary_factor", (1, 1.0, None), "partial rotary is not implemented")
    stated = fields.number("rope_theta", defaults.get("rope_theta", 10000.0))
    theta = rope.number("rope_theta", stated)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return theta, None, positions
    if kind not in ("linear", "dynamic", "llama3"):
        raise rope.wrong("rope_type", kind, "default, linear, dynamic or llama3")
    factor = rope.number("factor")
    if kind != "llama3":
        longest = rope.stretched("factor", positions, factor)
        return theta, RopeScaling(kind, factor, positions), longest
    scaling = RopeScaling(
        kind,
        factor,
        rope.positions("original_max_position_embeddings", positions),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.wrong(
            "high_freq_factor", scaling.high_freq_factor, "a number above low_freq_factor"
        )
    return theta, scaling, positions
