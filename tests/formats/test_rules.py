"""The tables cover the tree, and filling a leaf is the inverse of taking it apart."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.config import ModelConfig
from jaxpage.formats.assemble import expand, leaf_shapes
from jaxpage.formats.rules import (
    extract,
    fill,
    is_derived,
    source_shape,
)
from jaxpage.models.families.llama import GATE, GGUF_RULES, HF_RULES, META_RULES, UP, K, Q, V
from jaxpage.models.family import Rule

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=10,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    attention_bias=True,
    mlp_bias=True,
)
TABLES = {"hf": HF_RULES, "meta": META_RULES, "gguf": GGUF_RULES}


def targets(rules: tuple[Rule, ...]) -> list[tuple[str, str]]:
    """(leaf, part) of every stored tensor that the table keeps."""
    return [(path, str(rule.part)) for rule, _, path in expand(rules, CONFIG) if path is not None]


def parts_of(path: str) -> set[str]:
    parts = (Q, K, V) if "/qkv/" in path else (GATE, UP) if "/gate_up/" in path else ((),)
    return {str(part) for part in parts}


@pytest.mark.parametrize("name", TABLES)
def test_every_part_of_every_leaf_has_one_rule(name: str) -> None:
    wanted = {
        (path, part)
        for path in leaf_shapes(CONFIG)
        for part in parts_of(path)
        if not (name == "meta" and path.endswith("bias"))  # Meta's models have none
    }
    found = targets(TABLES[name])
    assert len(found) == len(set(found)), "two rules for one part"
    assert set(found) == wanted


def all_rules() -> list[Rule]:
    return [rule for rules in TABLES.values() for rule in rules if rule.target is not None]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.source)
def test_extract_is_the_inverse_of_fill(rule: Rule) -> None:
    assert rule.target is not None
    shape = leaf_shapes(CONFIG)[rule.target.format(i=1)]
    leaf = np.full(shape, np.nan, np.float32)
    stored_shape = source_shape(rule, shape)
    stored = np.random.default_rng(0).standard_normal(stored_shape, dtype=np.float32)
    fill(rule, leaf, stored)
    np.testing.assert_array_equal(extract(rule, leaf), stored)
    assert np.count_nonzero(~np.isnan(leaf)) == stored.size, "wrote outside its part"


def test_query_heads_of_a_group_lie_together() -> None:
    """Head n = k G + g, so the first three of six heads are KV head 0's."""
    rule = next(rule for rule in HF_RULES if "q_proj.bias" in rule.source)
    leaf = np.zeros((2, 5, 4), np.float32)
    fill(rule, leaf, np.arange(24, dtype=np.float32))
    np.testing.assert_array_equal(leaf[:, :3], np.arange(24).reshape(2, 3, 4))
    assert not leaf[:, 3:].any()


def test_neighbouring_rotary_pairs_become_halves() -> None:
    """One head of four rows: pairs (0 1) (2 3) -> firsts 0 2, seconds 1 3."""
    rule = next(rule for rule in GGUF_RULES if "attn_k.bias" in rule.source)
    leaf = np.zeros((2, 5, 4), np.float32)
    fill(rule, leaf, np.arange(8, dtype=np.float32))
    np.testing.assert_array_equal(leaf[:, 3], [[0, 2, 1, 3], [4, 6, 5, 7]])


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("rope.freqs", (4,), True),
        ("layers.31.attention.inner_attention.rope.freqs", (64,), True),
        ("rotary_emb.inv_freq", (4,), True),
        ("model.rotary_emb.inv_freq", (4,), True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", (1, 1, 64, 8), True),
        ("model.layers.0.self_attn.rotary_emb._sin_cached", (1, 1, 64, 8), True),
        ("model.layers.0.self_attn.rotary_emb.cos_sin_cache", (64, 8), True),
        ("model.rotary_emb.cos", (64, 8), True),
        ("model.layers.0.self_attn.rotary_emb.scale", (8,), False),
        ("model.cos", (64, 8), False),
        ("model.layers.0.self_attn.rotary_emb.sin_cached", (1, 1, 64, 8), True),
        ("model.rotary_emb.original_inv_freq", (4,), True),
        ("freqs_cis", (64, 4), True),
        ("model.layers.0.self_attn.masked_bias", (), True),
        ("model.layers.0.attn.bias", (1, 1, 64, 64), True),
        ("model.layers.0.attention.bias", (1, 1, 64, 64), True),
        ("model.layers.0.self_attn.bias", (1, 1, 64, 64), True),
        ("model.layers.0.self_attn.bias", (32,), False),
        ("model.layers.0.mlp.gate_proj.bias", (1, 1, 2, 2), False),
        ("model.layers.0.self_attn.q_norm.weight", (8,), False),
        ("rope_freqs.weight", (4,), False),
        ("rope_factors_long.weight", (4,), False),
        ("model.layers.0.self_attn.rotary_emb.weight", (4,), False),
    ],
)
def test_what_follows_from_the_config(name: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert is_derived(name, shape) == wanted
