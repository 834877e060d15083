"""Configs become models and parameters, without a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpage.config import ModelConfig
from jaxpage.device.ops import Ops
from jaxpage.errors import ConfigError
from jaxpage.models.registry import abstract_params, build_model, init_params, num_params
from tests.models.toys import NO_KV, With, dense_attention, prompt_step, toy_config

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, mistral"):
        build_model(toy_config(architecture="mamba"))
    with pytest.raises(ConfigError, match="'mamba'"):
        abstract_params(toy_config(architecture="mamba"))


def test_a_model_is_a_value() -> None:
    model = build_model(toy_config())
    assert isinstance(model, nn.Module) and model == build_model(toy_config())


def test_parameters_are_counted_as_published() -> None:
    assert num_params(SMOLLM2) == 134_515_008


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_fills_the_abstract_tree(dtype: str) -> None:
    config = toy_config(attention_bias=True, dtype=dtype)
    abstract, params = abstract_params(config), init_params(config)
    assert type(params) is dict
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    assert shapes == abstract
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(params))


def test_init_is_repeatable_and_differs_by_seed_and_path() -> None:
    config = toy_config()
    first, again, other = (init_params(config, key) for key in (1, jax.random.key(1), 2))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    kernels = [
        np.asarray(params[layer]["mlp"]["down"]["kernel"])
        for params in (first, other)
        for layer in ("layers_0", "layers_1")
    ]
    assert len({kernel.tobytes() for kernel in kernels}) == 4
    assert np.std(kernels[0]) == pytest.approx(0.02, rel=0.1)
    assert np.all(np.asarray(first["final_norm"]["scale"]) == 1)


def test_a_model_of_a_config_can_be_initialised_by_linen_too() -> None:
    config = toy_config()
    model, step = build_model(config), prompt_step([[1, 2]])
    ops = Ops.of(step, With(attend=dense_attention))
    variables = jax.eval_shape(
        lambda: model.init(jax.random.key(0), step.tokens, step.positions, (NO_KV,) * 2, ops)
    )
    assert variables["params"] == abstract_params(config)


def test_init_takes_the_model_itself() -> None:
    config = toy_config(num_layers=1)
    by_config, by_model = init_params(config), init_params(build_model(config))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, by_config, by_model)))
