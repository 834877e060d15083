"""Meta's `params.json` -> ModelConfig.

The file leaves out what Meta's code of its time fixed: the length a model was trained on, the
rotary stretching of Llama 3.1 and later, the token ids. They follow from the generation of the
model, which other settings show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxpage.config import MOST_LAYERS, ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.fields import Fields, words
from jaxpage.formats.tensors import Tensor
from jaxpage.models.family import Family
from jaxpage.models.registry import stored_as
from jaxpage.reading import MOST_SETTINGS_BYTES, read_json

_USED = words(
    "dim n_layers n_heads n_kv_heads head_dim vocab_size multiple_of ffn_dim_multiplier norm_eps "
    "rope_theta use_scaled_rope rope_scaling_factor max_seq_len"
)
_HARMLESS = frozenset(("max_batch_size", "model_parallel_size"))
_LLAMA3_VOCAB = 128256
# A rotary table in each layer: only LLaMA 1's files have it.
_LLAMA1_TABLE = "attention.inner_attention.rope.freqs"
_MOST_SIZE = 2**31


def read_meta_params(directory: Path) -> Fields:
    """The settings of `params.json`; CheckpointError for a key that is not known."""
    path = directory / "params.json"
    fields = Fields(read_json(path, most=MOST_SETTINGS_BYTES), str(path))
    fields.refuse_unknown(_USED | _HARMLESS | meta_family().layouts["meta"].keys)
    return fields


def parse_meta_config(fields: Fields, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The model's config; `tensors` give what the file leaves out: vocabulary, head, dtype."""
    embedding = tensors.get("tok_embeddings.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"got no matrix tok_embeddings.weight beside {fields.source}, wanted the embedding; "
            "the shards are incomplete or of another model"
        )
    is_tied = _is_tied(embedding, tensors.get("output.weight"))
    is_llama3 = embedding.shape[0] >= _LLAMA3_VOCAB
    scaling, usual = _rope(fields, is_tied=is_tied, is_llama3=is_llama3)
    if any(name.endswith(_LLAMA1_TABLE) for name in tensors):
        usual = 2048
    hidden_size, num_heads = fields.integer("dim"), fields.integer("n_heads")
    settings = {
        # -1 means the tokenizer's size, and the embedding was made with that.
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(fields),
        "num_layers": fields.integer("n_layers", most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("n_kv_heads", num_heads),
        "head_dim": fields.head_dim("head_dim", hidden_size, num_heads),
        "max_position_embeddings": fields.positions("max_seq_len", usual),
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "rope_theta": fields.number("rope_theta", 10000.0),
        "rope_scaling": scaling,
        "tie_word_embeddings": is_tied,
        # The reserved ids of Llama 3's tokenizer: begin, end of text, message and turn.
        "bos_token_id": 128000 if is_llama3 else 1,
        "eos_token_ids": (128001, 128008, 128009) if is_llama3 else (2,),
        "dtype": embedding.dtype,
    }
    family = meta_family()
    try:
        config = family.layouts["meta"].read(fields, settings)
    except ConfigError as error:
        raise CheckpointError(f"{error} ({fields.source})") from None
    return replace(config, architecture=family.name)


def meta_family() -> Family:
    """The family of all of Meta's files: there is only one, and params.json doesn't name it."""
    family = stored_as("meta", "")
    assert family is not None, "no family has a layout of Meta's"
    return family


def _intermediate_size(fields: Fields) -> int:
    """Source: FeedForward in Meta's llama/model.py: 2/3 of 4 D, scaled, rounded up."""
    size = int(2 * (4 * fields.integer("dim")) / 3)
    if fields.has("ffn_dim_multiplier"):
        multiplier = fields.number("ffn_dim_multiplier")
        if not multiplier * size < _MOST_SIZE:
            raise fields.wrong("ffn_dim_multiplier", multiplier, "a width below 2 ** 31 from it")
        size = int(multiplier * size)
    multiple = fields.integer("multiple_of", 256)
    return multiple * max(-(-size // multiple), 1)


def _rope(fields: Fields, *, is_tied: bool, is_llama3: bool) -> tuple[RopeScaling | None, int]:
    """(scaling, length in tokens) that the model's generation had."""
    theta = fields.number("rope_theta", 10000.0)
    if fields.flag("use_scaled_rope", False):
        # Factor 8 came with Llama 3.1; the small Llama 3.2 models, the only ones that tie their
        # head, use 32 (config.json of meta-llama/Llama-3.2-1B).
        factor = fields.number("rope_scaling_factor", 32.0 if is_tied else 8.0)
        return RopeScaling("llama3", factor, 8192, 1.0, 4.0), 131072
    if theta >= 1e6 and not is_llama3:
        return None, 16384  # Code Llama: LLaMA 2 trained on with a longer base
    if theta >= 500000:
        return None, 8192
    # LLaMA 1 was trained with norm_eps 1e-6, all but its largest, LLaMA 2 with 1e-5.
    return None, 2048 if fields.number("norm_eps", 1e-5) < 5e-6 else 4096


def _is_tied(embedding: Tensor, head: Tensor | None) -> bool:
    """True when there is no head, or one that repeats the embedding, as Llama 3.2 stores it."""
    if head is None:
        return True
    if head.shape != embedding.shape or head.dtype != embedding.dtype:
        return False
    rows, head_rows = embedding.read(), head.read()
    # Other models differ in the first rows, so both need not be read whole.
    return np.array_equal(rows[:8], head_rows[:8]) and np.array_equal(rows, head_rows)
