"""GGUF metadata: what is read, what is refused, and rotary stretching out of its table."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage.config import ModelConfig, RopeScaling
from jaxpage.errors import CheckpointError
from jaxpage.formats.gguf_config import read_gguf_config
from jaxpage.formats.gguf_io import GgufFile
from jaxpage.formats.tensors import Tensor
from tests.helpers.formats.gguf_file import rope_factors

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.vocab_size": 96,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def tensor(name: str, value: np.ndarray) -> Tensor:
    return Tensor(name, value.shape, "float32", value.nbytes, lambda: value)


def read(tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> ModelConfig:
    """`changes` has `__` for `.` in keys; None takes a key out."""
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    named = {"token_embd.weight": np.zeros((96, 32), np.float32), **(tensors or {})}
    stored = {name: tensor(name, value) for name, value in named.items()}
    return read_gguf_config(GgufFile(Path("model.gguf"), metadata, stored, "float32"))


def test_a_plain_model() -> None:
    assert read() == ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_what_may_be_missing() -> None:
    config = read(llama__vocab_size=None, llama__attention__head_count_kv=None)
    assert (config.vocab_size, config.num_kv_heads) == (96, 4)
    assert not read({"output.weight": np.zeros((96, 32), np.float32)}).tie_word_embeddings


def test_padding_rows_count(tmp_path: Path) -> None:
    assert read(llama__vocab_size=90).vocab_size == 96


def test_all_ends_of_a_turn() -> None:
    config = read(tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2)
    assert config.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("model", "bos", "ends"), [("llama", 1, (2,)), ("gpt2", None, ()), (None, None, ())]
)
@pytest.mark.parametrize("value", [None, 96, -1, 2**32 - 1, 2**63])
def test_special_ids_out_of_range_are_the_formats_own(
    value: int | None, model: str | None, bos: int | None, ends: tuple[int, ...]
) -> None:
    names = ("bos", "eos", "eot", "eom")
    changes = {f"tokenizer__ggml__{name}_token_id": value for name in names}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read(tokenizer__ggml__model=model, **changes)
    assert (config.bos_token_id, config.eos_token_ids) == (bos, ends)
    said = [str(warning.message) for warning in caught]
    assert len(said) == (0 if value is None else 4)
    for name in names if said else ():
        assert any(f"tokenizer.ggml.{name}_token_id={value} in model.gguf" in line for line in said)


@pytest.mark.parametrize("value", ["</s>", 2.0, True, [2]])
def test_special_ids_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.eos_token_id=.* in model\.gguf"):
        read(tokenizer__ggml__eos_token_id=value)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scale_linear": 4.0},
    ],
)
def test_linear_stretching(changes: dict[str, Any]) -> None:
    config = read(**changes)
    assert config.rope_scaling == RopeScaling("linear", 4.0, 64)
    assert config.max_position_embeddings == 256


def test_linear_stretching_with_the_original_length() -> None:
    config = read(
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=16,
    )
    assert config.rope_scaling == RopeScaling("linear", 4.0, 16)
    assert config.max_position_embeddings == 64


def llama3_table(rule: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    rope = {
        "rope_type": "llama3",
        "factor": rule.factor,
        "low_freq_factor": rule.low_freq_factor,
        "high_freq_factor": rule.high_freq_factor,
        "original_max_position_embeddings": rule.original_max_position_embeddings,
    }
    table = rope_factors(
        {
            "rope_scaling": rope,
            "rope_theta": theta,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "head_dim": head_dim,
        }
    )
    assert table is not None
    return table


@pytest.mark.parametrize(
    ("theta", "head_dim", "rule"),
    [
        (500000.0, 128, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
        (500000.0, 64, RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)),
        (10000.0, 64, RopeScaling("llama3", 16.0, 4096, 1.0, 8.0)),
        (10000.0, 8, RopeScaling("llama3", 8.0, 16, 1.0, 4.0)),
    ],
    ids=["3.1", "3.2", "fitted", "one divisor on the ramp"],
)
def test_llama3_rule_out_of_its_table(theta: float, head_dim: int, rule: RopeScaling) -> None:
    config = read(
        {"rope_freqs.weight": llama3_table(rule, theta, head_dim)},
        llama__attention__key_length=head_dim,
        llama__rope__freq_base=theta,
    )
    assert config.rope_scaling == rule


def test_only_ratios_of_the_llama3_rule_count() -> None:
    rule = RopeScaling("llama3", 4.0, 2048, 2.0, 8.0)
    table = llama3_table(rule, 500000.0, 128)
    found = read(
        {"rope_freqs.weight": table},
        llama__attention__key_length=128,
        llama__rope__freq_base=500000.0,
    ).rope_scaling
    wanted = RopeScaling("llama3", 4.0, 1024, 1.0, 4.0)
    assert found == wanted
    np.testing.assert_allclose(llama3_table(wanted, 500000.0, 128), table, rtol=1e-4)


def test_a_table_of_ones_is_no_stretching() -> None:
    assert read({"rope_freqs.weight": np.ones(4, np.float32)}).rope_scaling is None


@pytest.mark.parametrize(
    "table",
    [[1, 3, 2, 8], [1, 1, 1], [1, 1, 1, math.nan], [1, 1, 0, 1], [8, 1, 8, 1]],
    ids=["no rule", "wrong length", "nan", "zero", "falling"],
)
def test_other_tables_are_refused(table: list[float]) -> None:
    with pytest.raises(CheckpointError, match="rope_freqs"):
        read({"rope_freqs.weight": np.array(table, np.float32)})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "qwen2"}, "qwen2"),
        ({"general__architecture": None}, "None"),
        ({"split__count": 3}, "3 parts"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__attention__causal": False}, "causal"),
        ({"llama__logit_scale": 2.0}, "logit_scale"),
        ({"llama__rope__scaling__type": "yarn"}, "scaling.type"),
        ({"llama__rope__dimension_count": 4}, "dimension_count"),
        ({"llama__attention__value_length": 16}, "value_length"),
        ({"llama__block_count": None}, "block_count"),
        ({"llama__feed_forward_length": [48, 48]}, "feed_forward_length"),
        ({"llama__attention__head_count_kv": 3}, "num_kv_heads"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)
