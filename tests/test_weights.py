"""Quantised leaves: a model of them computes what one of the matrices they stand for does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import jaxpage as jp
from jaxpage.backends.xla import Xla
from jaxpage.models.params import checked_params
from jaxpage.weights import Quantized, dense, take_rows
from tests.models.toys import toy_config


def quantized(matrix: Array, group: int | None = None) -> Quantized:
    """int8, a scale for every `group` entries of a row (the whole row)."""
    group = group or matrix.shape[-1]
    parts = np.asarray(matrix, np.float32).reshape(*matrix.shape[:-1], -1, group)
    scales = np.maximum(np.abs(parts).max(-1), 1e-6) / 127
    values = np.round(parts / scales[..., None]).astype(np.int8).reshape(matrix.shape)
    return Quantized(jnp.asarray(values), jnp.asarray(scales, matrix.dtype), group=group)


def all_quantized(tree: Any, group: int | None) -> Any:
    """The parameters with every matrix quantised."""
    if isinstance(tree, Mapping):
        return {name: all_quantized(leaf, group) for name, leaf in tree.items()}
    return quantized(tree, group) if tree.ndim > 1 else tree


def all_dense(tree: Any) -> Any:
    return jax.tree.map(dense, tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))


@pytest.mark.parametrize("group", [None, 8])
def test_it_stands_for_the_nearest_multiples_of_its_scales(group: int | None) -> None:
    matrix = jax.random.normal(jax.random.key(0), (3, 5, 32))
    got = quantized(matrix, group)
    assert got.shape == matrix.shape and got.dtype == matrix.dtype
    error = np.abs(np.asarray(got.dense() - matrix)).reshape(3, 5, -1, got.group).max(-1)
    assert (error <= 0.51 * np.asarray(got.scales)).all() and error.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("group", [None, 8])
def test_products_and_rows_are_those_of_the_dense_matrix(
    group: int | None, num_tokens: int
) -> None:
    weight = quantized(jax.random.normal(jax.random.key(0), (3, 5, 32)), group)
    x = jax.random.normal(jax.random.key(1), (num_tokens, 32))
    got = jax.jit(Xla().linear)(x, weight)
    np.testing.assert_allclose(got, x @ weight.dense().reshape(15, 32).T, atol=1e-4)
    table = quantized(jax.random.normal(jax.random.key(2), (9, 32)), group)
    ids = jnp.array([8, 0, 0, 3], jnp.int32)
    np.testing.assert_array_equal(take_rows(table, ids), table.dense()[ids])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_of_quantised_matrices_is_that_of_their_dense_ones(
    group: int | None, is_tied: bool, dtype: str
) -> None:
    config = toy_config(tie_word_embeddings=is_tied, dtype=dtype)
    model, params = jp.build_model(config), all_quantized(jp.init_params(config), group)
    step = jp.prefill_input([[1, 2, 3], [4]], [[1], [2]], 8)

    @jax.jit
    def logits(params: Any) -> Array:
        return jp.forward(model, params, jp.init_cache(config, 2, 8), step)[1]

    got = np.asarray(logits(params))
    np.testing.assert_allclose(got, logits(all_dense(params)), atol=1e-5)
    assert np.abs(got - np.asarray(logits(jp.init_params(config)))).max() > 1e-5


def test_checked_params_take_it_in_a_matrixs_place() -> None:
    config = toy_config()
    params = all_quantized(jp.init_params(config), 8)
    taken = checked_params(params, config)
    assert jax.tree.structure(taken) == jax.tree.structure(params)


def with_kernel(change: Any) -> tuple[Any, Any]:
    config = toy_config()
    params = jp.init_params(config)
    params["lm_head"] = {"kernel": change(quantized(params["lm_head"]["kernel"], 8))}
    return params, config


@pytest.mark.parametrize(
    "change",
    [
        lambda q: replace(q, values=q.values[:-1], scales=q.scales[:-1]),
        lambda q: replace(q, values=q.values.astype(jnp.int32)),
        lambda q: replace(q, scales=q.scales[:, :-1]),
        lambda q: replace(q, scales=q.scales.astype(jnp.bfloat16)),
        lambda q: replace(q, group=16),
        lambda q: replace(q, values="x"),
    ],
    ids=["rows", "values", "scales", "dtype", "group", "no array"],
)
def test_a_wrong_one_is_named(change: Any) -> None:
    with pytest.raises(jp.ConfigError, match="lm_head/kernel"):
        checked_params(*with_kernel(change))


def test_a_bias_stays_an_array() -> None:
    config = toy_config(attention_bias=True)
    params = jp.init_params(config)
    qkv = params["layers_0"]["attention"]["qkv"]
    qkv["bias"] = quantized(qkv["bias"])
    with pytest.raises(jp.ConfigError, match="qkv/bias"):
        checked_params(params, config)


@pytest.mark.slow
def test_an_engine_serves_it_and_copies_numpy_parts() -> None:
    config = toy_config(max_position_embeddings=32)
    params = all_quantized(jp.init_params(config, 3), 8)
    greedy = jp.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    make = partial(jp.LLM, config=config, attention="xla", block_size=4, num_blocks=8)
    mine = jax.tree.map(np.array, params)
    served, plain = make(params=mine), make(params=all_dense(params))
    for leaf in jax.tree.leaves(mine):
        leaf[...] = 0
    got, want = (llm.generate([[1, 2, 3]], greedy)[0].outputs[0] for llm in (served, plain))
    assert got.token_ids == want.token_ids
    served.close()
    plain.close()
