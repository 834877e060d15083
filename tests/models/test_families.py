"""The table of families: how leaves are cut over devices, and who may join it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P

from jaxpage.errors import ConfigError
from jaxpage.formats.assemble import leaf_shapes
from jaxpage.models.families.llama import LLAMA
from jaxpage.models.family import Layout
from jaxpage.models.registry import FAMILIES, build_model, family_of, register, stored_as
from tests.models.toys import toy_config

SPECS = {
    "embed/embedding": P("model"),
    "layers_1/input_norm/scale": P(),
    "layers_1/attention/qkv/kernel": P("model"),
    "layers_1/attention/qkv/bias": P("model"),
    "layers_1/attention/out/kernel": P(None, "model"),
    "layers_1/attention/out/bias": P(),
    "layers_1/post_attention_norm/scale": P(),
    "layers_1/mlp/gate_up/kernel": P(None, "model"),
    "layers_1/mlp/gate_up/bias": P(None, "model"),
    "layers_1/mlp/down/kernel": P(None, "model"),
    "layers_1/mlp/down/bias": P(),
    "final_norm/scale": P(),
    "lm_head/kernel": P("model"),
}


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_leaf_has_a_place_on_two_devices(name: str) -> None:
    config = toy_config(architecture=name, attention_bias=True, mlp_bias=True, vocab_size=62)
    shapes = leaf_shapes(config)
    found = {path: family_of(config).spec(path) for path in shapes if "layers_0" not in path}
    assert found == SPECS
    for path, spec in found.items():
        cut = [size for size, axis in zip(shapes[path], spec, strict=False) if axis == "model"]
        assert all(size % 2 == 0 for size in cut), path


def test_a_leaf_without_a_row_is_named() -> None:
    with pytest.raises(ConfigError, match=r"layers_0/router/kernel.*llama's sharding"):
        LLAMA.spec("layers_0/router/kernel")


def test_a_registered_family_is_built_like_any_other() -> None:
    toy = register(replace(LLAMA, name="toy", layouts={}))
    config = toy_config(architecture="toy")
    assert family_of(config) is toy
    assert type(build_model(config)) is type(build_model(toy_config()))
    newer = register(replace(toy, sharding=()))
    assert family_of(config) is newer


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM"])
def test_a_name_that_files_give_another_family_is_refused(name: str) -> None:
    layout = Layout(names=("ToyForCausalLM", name), rules=(), read=lambda *_: toy_config())
    with pytest.raises(ConfigError, match=f"family toy.*'{name}', as they do (llama|mistral)"):
        register(replace(LLAMA, name="toy", layouts={"huggingface": layout}))
    assert stored_as("huggingface", "ToyForCausalLM") is None
