"""Meta's params.json: what each generation leaves out, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage.config import ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError
from jaxpage.formats.meta_config import parse_meta_config, read_meta_params
from jaxpage.formats.tensors import Tensor

# params.json of the published models, as they are.
LLAMA1_7B = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6}
LLAMA2_7B = LLAMA1_7B | {"norm_eps": 1e-5, "vocab_size": -1}
LLAMA3_8B = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA31_8B = LLAMA3_8B | {"use_scaled_rope": True}
CODE_LLAMA_7B = LLAMA2_7B | {"ffn_dim_multiplier": 1.0, "rope_theta": 1000000}


def tensor(name: str, rows: int, seed: int = 0) -> Tensor:
    value = np.random.default_rng(seed).standard_normal((rows, 2), dtype=np.float32)
    return Tensor(name, value.shape, "bfloat16", value.nbytes, lambda: value)


def parse(
    params: dict[str, Any], folder: Path, *, vocab: int = 128256, head: int | None = 1
) -> ModelConfig:
    """`head` is the seed of the output matrix; 0 repeats the embedding, None leaves it out."""
    (folder / "params.json").write_text(json.dumps(params))
    tensors = {"tok_embeddings.weight": tensor("tok_embeddings.weight", vocab)}
    if head is not None:
        tensors["output.weight"] = tensor("output.weight", vocab, head)
    return parse_meta_config(read_meta_params(folder), tensors)


@pytest.mark.parametrize(
    ("params", "vocab", "length", "inner", "kv_heads"),
    [
        (LLAMA1_7B, 32000, 2048, 11008, 32),
        (LLAMA2_7B, 32000, 4096, 11008, 32),
        (CODE_LLAMA_7B, 32016, 16384, 11008, 32),
        (CODE_LLAMA_7B, 32000, 16384, 11008, 32),
        (LLAMA3_8B, 128256, 8192, 14336, 8),
        (LLAMA31_8B, 128256, 131072, 14336, 8),
    ],
    ids=["1", "2", "code", "code-python", "3", "3.1"],
)
def test_generations(
    params: dict[str, Any], vocab: int, length: int, inner: int, kv_heads: int, tmp_path: Path
) -> None:
    config = parse(params, tmp_path, vocab=vocab)
    assert config.vocab_size == vocab
    assert config.max_position_embeddings == length
    assert config.intermediate_size == inner
    assert config.num_kv_heads == kv_heads
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings
    is_llama3 = vocab == 128256
    assert config.bos_token_id == (128000 if is_llama3 else 1)
    assert config.eos_token_ids == ((128001, 128008, 128009) if is_llama3 else (2,))


def test_scaled_rope_is_that_of_the_generation(tmp_path: Path) -> None:
    assert parse(LLAMA31_8B, tmp_path).rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    tied = parse(LLAMA31_8B, tmp_path, head=0)
    assert tied.rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    stated = parse(LLAMA31_8B | {"rope_scaling_factor": 16}, tmp_path)
    assert stated.rope_scaling == RopeScaling("llama3", 16.0, 8192, 1.0, 4.0)
    assert parse(LLAMA3_8B, tmp_path).rope_scaling is None


def test_the_largest_llama_1_is_known_by_its_rotary_tables(tmp_path: Path) -> None:
    """Its norm_eps is LLaMA 2's."""
    (tmp_path / "params.json").write_text(json.dumps(LLAMA1_7B | {"norm_eps": 1e-5}))
    names = ("tok_embeddings.weight", "layers.0.attention.inner_attention.rope.freqs")
    config = parse_meta_config(read_meta_params(tmp_path), {n: tensor(n, 32000) for n in names})
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(("head", "is_tied"), [(0, True), (None, True), (1, False)])
def test_a_head_that_repeats_the_embedding_is_tied(
    head: int | None, is_tied: bool, tmp_path: Path
) -> None:
    assert parse(LLAMA3_8B, tmp_path, head=head).tie_word_embeddings == is_tied


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe": {"num_experts": 8}}, "moe"),
        ({"dim": "big"}, "dim"),
        ({"n_heads": None}, "n_heads"),
        ({"n_layers": 2**31}, "n_layers"),
        ({"max_seq_len": 2**31}, "max_seq_len"),
        ({"ffn_dim_multiplier": 1e29}, "ffn_dim_multiplier"),
        ({"ffn_dim_multiplier": float("inf")}, "ffn_dim_multiplier"),
    ],
)
def test_bad_params_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(LLAMA3_8B | changes, tmp_path)


def test_no_embedding(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(LLAMA3_8B))
    with pytest.raises(CheckpointError, match=r"tok_embeddings\.weight"):
        parse_meta_config(read_meta_params(tmp_path), {})
