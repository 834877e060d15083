"""One model, every format that `convert` reads: the same parameters, Hugging Face's logits.

The writers are tests/helpers/formats, which share no code with the readers. What transformers says
of the models is kept in tests/golden/data (tests/tiny/make_golden.py writes it).
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from convert.run import convert
from jaxpage.checkpoint import load, load_weights
from jaxpage.config import DType, ModelConfig
from jaxpage.device.inputs import prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.functional import forward
from jaxpage.models.registry import build_model
from tests.golden import DATA_DIR
from tests.helpers.formats import (
    VARIANTS,
    ModelFiles,
    variant,
    write_gguf,
    write_hf,
    write_hf_bin,
    write_meta,
)
from tests.helpers.formats.meta import neighbours_from_halves
from tests.tiny import MODEL_DIR
from tests.tiny.prompts import PROMPTS

GOLDEN = DATA_DIR / "golden_tiny_random.json"
BLOCK_SIZE = 8
TOLERANCE = 1e-5
HEADS = ("gqa", "mha", "mqa", "tied", "mqa_tied", "wide_heads", "odd_vocab")
META = ("gqa", "mha", "mqa", "theta", "llama31_rope")
"""What Meta's params.json can say; the rest of its config is told by the generation."""


@cache
def golden() -> dict[str, dict[str, Any]]:
    cases = json.loads(GOLDEN.read_text())["variants"]
    return {case["variant"]: case for case in cases}


def hf_twin(model: ModelFiles, folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model through one safetensors file, which the golden logits vouch for."""
    return load_weights(write_hf(model, folder / "twin"))


def last_logits(config: ModelConfig, params: Any, token_ids: list[int]) -> np.ndarray:
    """Logits [V] after the prompt, through the paged step and the plain attention."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = init_cache(config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    table = list(range(num_blocks, 0, -1))
    step = prefill_input([token_ids], block_tables=[table], block_size=BLOCK_SIZE)
    run = jax.jit(forward, static_argnames=("model", "attention"))
    _, logits = run(build_model(config), params, cache, step, attention="reference")
    return np.asarray(logits[0])


def assert_same_model(
    found: tuple[ModelConfig, dict[str, Any]], wanted: tuple[ModelConfig, dict[str, Any]]
) -> None:
    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])


def assert_same(found: Any, wanted: Any) -> None:
    """Equal trees, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_hf_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, params = load_weights(write_hf(variant(name), tmp_path))
    case = golden()[name]
    found = last_logits(config, params, case["prompt_token_ids"])
    wanted = np.array(case["logits"], np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("gqa", "linear_rope"),
        ("linear_rope", "dynamic_rope"),
        ("gqa", "llama31_rope"),
        ("llama3_rope", "wide_heads"),
        ("rope_parameters", "llama31_rope"),
        ("gqa", "sliding_window"),
    ],
)
def test_golden_logits_tell_variants_apart(first: str, second: str) -> None:
    """Weights are the same here, so a setting that a reader ignores would go unseen otherwise."""
    ours, theirs = (np.array(golden()[name]["logits"]) for name in (first, second))
    assert np.abs(ours - theirs).max() > 100 * TOLERANCE


def permuted_q(weights: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = neighbours_from_halves(weights[name], 4)


def swapped_kv(weights: dict[str, np.ndarray]) -> None:
    k, v = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    weights[k], weights[v] = weights[v], weights[k]


def swapped_kv_heads(weights: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = np.roll(weights[name], 8, axis=0)


def swapped_gate_up(weights: dict[str, np.ndarray]) -> None:
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def zeroed_out(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.1.self_attn.o_proj.weight"][:] = 0


@pytest.mark.parametrize(
    "damage", [permuted_q, swapped_kv, swapped_kv_heads, swapped_gate_up, zeroed_out]
)
def test_tolerance_catches_a_reader_that_mixes_tensors_up(damage: Any, tmp_path: Path) -> None:
    model = variant("gqa")
    damage(model.weights)
    case = golden()["gqa"]
    found = last_logits(*load_weights(write_hf(model, tmp_path)), case["prompt_token_ids"])
    assert np.abs(found - np.array(case["logits"])).max() > 100 * TOLERANCE


@pytest.mark.parametrize("shards", [2, 3])
def test_hf_shards_hold_the_same_parameters(shards: int, tmp_path: Path) -> None:
    model = variant("gqa")
    found = load_weights(write_hf(model, tmp_path, shards=shards))
    assert_same_model(found, hf_twin(model, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_hf_half_precision_is_read_bit_for_bit(dtype: DType, asked: DType, tmp_path: Path) -> None:
    model = variant("gqa")
    config, params = load_weights(write_hf(model, tmp_path, dtype=dtype), asked)
    assert config.dtype == (dtype if asked == "auto" else asked)
    _, whole = hf_twin(model, tmp_path)
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(config.dtype), whole)
    assert_same(params, cast)


@pytest.mark.parametrize("name", [*HEADS, "attention_bias", "mlp_bias", "linear_rope", "theta"])
def test_gguf_holds_the_same_model(name: str, tmp_path: Path) -> None:
    model = variant(name)
    write_gguf(model, tmp_path / "model.gguf")
    config, params = load_weights(tmp_path / "model.gguf")
    wanted, whole = hf_twin(model, tmp_path)
    # Ids of begin and end belong to GGUF's tokenizer, which these models don't have.
    assert replace(config, bos_token_id=None, eos_token_ids=()) == replace(
        wanted, bos_token_id=None, eos_token_ids=()
    )
    assert_same(params, whole)


@pytest.mark.parametrize("name", ["llama3_rope", "llama31_rope"])
def test_gguf_keeps_llama3_scaling(name: str, tmp_path: Path) -> None:
    """It is stored as a table of factors, so the logits are compared, not the settings."""
    write_gguf(variant(name), tmp_path / "model.gguf")
    config, params = load_weights(tmp_path / "model.gguf")
    case = golden()[name]
    found = last_logits(config, params, case["prompt_token_ids"])
    wanted = np.array(case["logits"], np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_kinds_hold_what_was_rounded(kind: str, tmp_path: Path) -> None:
    stored = write_gguf(variant("gqa"), tmp_path / "model.gguf", kind=kind)
    _, params = load_weights(tmp_path / "model.gguf", "float32")
    _, whole = hf_twin(stored, tmp_path)
    assert_same(params, whole)


@pytest.mark.filterwarnings("ignore:.* has no tokenizer")
@pytest.mark.parametrize("name", ["gqa", "tied", "mlp_bias", "dynamic_rope", "sliding_window"])
def test_conversion_and_back_keeps_the_model(name: str, tmp_path: Path) -> None:
    model = variant(name)
    wanted = hf_twin(model, tmp_path)
    convert(tmp_path / "twin", tmp_path / "orbax")
    assert_same_model(load_weights(tmp_path / "orbax"), wanted)
    convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
    assert_same_model(load_weights(tmp_path / "hf"), wanted)
    written = ModelFiles.read(tmp_path / "hf").weights
    assert written.keys() == model.weights.keys()
    for tensor, value in model.weights.items():
        np.testing.assert_array_equal(written[tensor], value, err_msg=tensor)


def test_tiny_model_is_one_model_in_every_format(tmp_path: Path) -> None:
    """Weights bit for bit, ids of every prompt, the chat template; F16 is exact for this model."""
    model = ModelFiles.read(MODEL_DIR)
    write_gguf(model, tmp_path / "f32.gguf")
    write_gguf(model, tmp_path / "f16.gguf", kind="F16")
    convert(MODEL_DIR, tmp_path / "orbax")
    convert(tmp_path / "f32.gguf", tmp_path / "hf", to="hf")
    wanted, params, tokenizer = load(MODEL_DIR)
    for name in ("f32.gguf", "f16.gguf", "orbax", "hf"):
        config, found, other = load(tmp_path / name)
        assert config == wanted, name
        assert_same(found, params)
        assert other.chat_template == tokenizer.chat_template, name
        for text in PROMPTS.values():
            ids = tokenizer.encode(text)
            assert other.encode(text) == ids, name
            assert other.decode(ids) == tokenizer.decode(ids), name


@pytest.mark.torch
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pytorch_bin_holds_the_same_parameters(shards: int, dtype: DType, tmp_path: Path) -> None:
    model = variant("gqa")
    folder = write_hf_bin(model, tmp_path / "bin", shards=shards, dtype=dtype)
    _, wanted = load_weights(write_hf(model, tmp_path / "twin", dtype=dtype))
    _, params = load_weights(folder)
    assert_same(params, wanted)


@pytest.mark.torch
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("embeddings", ["columns", "rows"])
@pytest.mark.parametrize("name", META)
def test_meta_shards_hold_the_same_model(
    name: str, embeddings: Any, shards: int, tmp_path: Path
) -> None:
    model = variant(name)
    folder = write_meta(model, tmp_path / "meta", shards=shards, embeddings=embeddings)
    config, params = load_weights(folder)
    wanted, whole = hf_twin(model, tmp_path)
    if embeddings == "columns":  # there is no scaling in files of that age
        wanted = replace(wanted, rope_scaling=None)
    assert replace(config, max_position_embeddings=0) == replace(wanted, max_position_embeddings=0)
    assert_same(params, whole)


@pytest.mark.torch
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", ["tied", "mqa_tied"])
def test_meta_with_equal_head_gives_the_same_logits(name: str, shards: int, tmp_path: Path) -> None:
    """Meta stores the head of a tied model too."""
    folder = write_meta(variant(name), tmp_path, shards=shards, embeddings="rows")
    config, params = load_weights(folder)
    case = golden()[name]
    found = last_logits(config, params, case["prompt_token_ids"])
    wanted = np.array(case["logits"], np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
