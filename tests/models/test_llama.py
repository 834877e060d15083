"""The tree is the documented one, the cache is written in place, dtypes and gradients hold."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpage.config import AttentionSpec, ModelConfig
from jaxpage.device.inputs import prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.types import LayerKV, StepInput
from jaxpage.functional import forward
from jaxpage.models import llama
from jaxpage.models.registry import abstract_params, build_model, init_params
from tests.models.toys import (
    dense_attention,
    hidden_of,
    logits_of,
    prompt_step,
    storing_attention,
    toy_config,
)


def documented_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameter tree as the docstring of models/llama.py states it."""
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "H": config.head_dim,
    }
    is_present = {
        "only with attention_bias": config.attention_bias,
        "only with mlp_bias": config.mlp_bias,
        "absent when tied to embed": not config.tie_word_embeddings,
    }
    shapes = {}
    for path, shape, note in re.findall(
        r"^ {4}(\S+/\S+) +\[(.+?)\] *(.*)$", llama.__doc__ or "", re.M
    ):
        if is_present.get(note, True):
            for index in range(config.num_layers) if "_i/" in path else (0,):
                dims = [eval(dim, {}, sizes) for dim in shape.split(",")]
                shapes[path.replace("_i/", f"_{index}/")] = tuple(dims)
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
def test_the_tree_is_the_documented_one(flag: bool) -> None:
    config = toy_config(attention_bias=flag, mlp_bias=flag, tie_word_embeddings=flag)
    params = init_params(config)
    actual = {
        "/".join(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    assert actual == documented_shapes(config)
    assert len(actual) == (1 + 2 * 10 + 1 if flag else 2 * 6 + 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2, 16])
def test_the_cache_is_updated_in_place_and_no_weight_is_copied(num_tokens: int) -> None:
    config = toy_config(hidden_size=128, intermediate_size=512, head_dim=32, vocab_size=2048)
    model, params = build_model(config), abstract_params(config)
    pool = jax.ShapeDtypeStruct((65, 16, config.num_kv_heads, config.head_dim), jnp.float32)
    cache = (LayerKV(k=pool, v=pool),) * 2

    def forward(params: Any, cache: Any, step: StepInput) -> Any:
        hidden, cache = hidden_of(model, params, step, storing_attention, cache=cache)
        return logits_of(model, params, hidden[step.logit_index]), cache

    lowered = jax.jit(forward, donate_argnums=1).lower(
        params, cache, prompt_step([range(num_tokens)])
    )
    assert lowered.as_text().count("optimization_barrier") == 5, "the block is traced once"
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    pool_bytes = 4 * pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    # Less than the smallest matrix of a layer: nothing of a weight's or a pool's size is copied.
    smallest = min(leaf.size * 4 for leaf in jax.tree.leaves(params["layers_0"]) if leaf.ndim > 1)
    assert memory.temp_size_in_bytes < smallest + 8 * num_tokens * config.intermediate_size * 4


def test_each_layer_uses_its_own_weights_and_cache() -> None:
    config = toy_config(num_layers=3)
    params, step = init_params(config, 1), prompt_step([[5, 6, 7]])

    def recording(q: Array, k: Array, v: Array, layer_kv: LayerKV, *_: Any) -> tuple[Array, Any]:
        return q, LayerKV(k=layer_kv.k + jnp.sum(v), v=None)

    def sums(params: Any) -> np.ndarray:
        cache = tuple(LayerKV(k=jnp.float32(10 * i), v=None) for i in range(3))
        _, after = hidden_of(build_model(config), params, step, recording, cache=cache)
        return np.asarray([layer.k for layer in after])

    seen = sums(params) - [0, 10, 20]
    assert len(set(seen.tolist())) == 3
    swapped = {**params, "layers_0": params["layers_2"], "layers_2": params["layers_0"]}
    assert not np.allclose(sums(swapped), sums(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tied"),
    [("float32", False), ("bfloat16", True), ("bfloat16", False), ("float16", False)],
)
def test_activations_follow_the_dtype_and_logits_are_float32(dtype: str, tied: bool) -> None:
    config = toy_config(dtype=dtype, tie_word_embeddings=tied)
    model, params = build_model(config), init_params(config, 3)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    seen: list[Any] = []

    def attention(q: Array, k: Array, v: Array, *rest: Any) -> tuple[Array, Any]:
        seen.extend((q.dtype, k.dtype, v.dtype))
        return dense_attention(q, k, v, *rest)

    def forward(params: Any, step: StepInput) -> Any:
        hidden, _ = hidden_of(model, params, step, attention)
        return hidden, logits_of(model, params, hidden)

    hidden, logits = jax.jit(forward)(params, prompt_step([[1, 2, 3]]))
    assert {str(each) for each in (*seen, hidden.dtype)} == {dtype}
    assert logits.dtype == jnp.float32 and logits.shape == (3, config.vocab_size)
    wide = [leaf.astype(jnp.float32) for leaf in (hidden, params["embed"]["embedding"])]
    head = wide[1] if tied else params["lm_head"]["kernel"].astype(jnp.float32)
    # Logits are not rounded to the model's dtype on their way.
    np.testing.assert_allclose(logits, wide[0] @ head.T, atol=1e-5)


@pytest.mark.slow
def test_the_gradient_reaches_every_parameter() -> None:
    config = toy_config(attention_bias=True, mlp_bias=True)
    model, params, step = build_model(config), init_params(config), prompt_step([[1, 2, 3, 4]])

    def loss(params: Any) -> Array:
        hidden, _ = hidden_of(model, params, step, dense_attention)
        logits = logits_of(model, params, hidden)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 7])

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert float(jnp.max(jnp.abs(leaf))) > 0, jax.tree_util.keystr(path)
    slope = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
    lower = jax.tree.map(lambda leaf, g: leaf - 1e-3 * g, params, gradient)
    assert float(value - jax.jit(loss)(lower)) == pytest.approx(1e-3 * slope, rel=0.05)


def test_the_block_is_traced_once_for_all_layers_and_calls() -> None:
    config = toy_config(num_layers=4)
    model, params, step = build_model(config), init_params(config), prompt_step([[1, 2]])
    calls = []

    def counting(q: Array, k: Array, v: Array, layer_kv: Any, *_: Any) -> tuple[Array, Any]:
        calls.append(q.shape)
        return q, layer_kv

    for _ in range(2):  # without an outer jit, as a researcher may call it
        hidden_of(model, params, step, counting)
    assert calls == [(2, config.num_heads, config.head_dim)]


@dataclass(frozen=True, slots=True)
class EverySecondLayerIsLocal(ModelConfig):
    """Layer 1, 3, ... see three tokens."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        return AttentionSpec(scale=self.head_dim**-0.5, window=3 if layer % 2 else None)


@pytest.mark.slow
def test_layers_of_different_windows_are_traced_apart_and_see_their_own() -> None:
    plain = toy_config(num_layers=4)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    config = EverySecondLayerIsLocal(**fields)
    model, params, step = build_model(config), init_params(config), prompt_step([range(9)])
    windows: list[int | None] = []

    def recording(*args: Any) -> Any:
        windows.append(args[-1].window)
        return dense_attention(*args)

    hidden, _ = hidden_of(model, params, step, recording)
    assert sorted(windows, key=str) == [3, None]
    cache = init_cache(config, num_blocks=3, block_size=4)
    paged = prefill_input([list(range(9))], [[1, 2, 3]], 4)
    _, got = forward(model, params, cache, paged)
    np.testing.assert_allclose(got, logits_of(model, params, hidden)[-1:], atol=1e-5)
    other, _ = hidden_of(build_model(plain), params, step, dense_attention)
    assert np.abs(np.asarray(other[-1] - hidden[-1])).max() > 1e-4
