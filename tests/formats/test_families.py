"""A family of one's own: read, written and built by its tables, with no shipped file changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from convert.run import convert
from jaxpage.checkpoint import load_weights
from jaxpage.config import ModelConfig
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.fields import Fields
from jaxpage.formats.gguf_config import read_gguf_config
from jaxpage.formats.gguf_io import GgufFile
from jaxpage.models.families.llama import HF_LAYOUT, LLAMA
from jaxpage.models.family import Family, Rule
from jaxpage.models.layers import RMSNorm
from jaxpage.models.llama import Llama
from jaxpage.models.registry import FAMILIES, register
from tests.helpers.formats import ModelFiles, variant, write_hf


@dataclass(frozen=True, slots=True)
class ToyConfig(ModelConfig):
    """A Llama whose last norm is followed by another; the other fields are only kept."""

    logit_scale: float = 1.0
    experts: float | None = None
    kinds: tuple[str, ...] = ()


class Toy(Llama):
    """Its module."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.second_norm = RMSNorm(c.rms_norm_eps, jnp.dtype(c.dtype))

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        hidden, cache = super().__call__(*arguments)
        return self.second_norm(hidden, arguments[-1]), cache


def read(fields: Fields, settings: dict[str, Any]) -> ToyConfig:
    kinds = tuple(fields.values["layer_types"])
    scale = fields.number("logit_scale")
    return ToyConfig(**settings, logit_scale=scale, experts=8, kinds=kinds)


def write(config: ModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(config, ToyConfig)
    return values | {"logit_scale": config.logit_scale, "layer_types": list(config.kinds)}


TOY = Family(
    name="toy",
    module=Toy,
    config=ToyConfig,
    layouts={
        "huggingface": replace(
            HF_LAYOUT,
            names=("ToyForCausalLM",),
            rules=(*HF_LAYOUT.rules, Rule("model.norm2.weight", "second_norm/scale")),
            read=read,
            write=write,
            keys=frozenset(("logit_scale", "layer_types")),
        ),
        "gguf": replace(LLAMA.layouts["gguf"], names=("toy",), keys=frozenset(("logit_scale",))),
    },
    sharding=(*LLAMA.sharding, (r"second_norm/scale$", PartitionSpec())),
)
SECOND = np.linspace(0.5, 1.5, 32, dtype=np.float32)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register(TOY)
    yield
    del FAMILIES["toy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = variant("gqa")
    more = {"logit_scale": 2.0, "layer_types": ["full_attention"] * 2}
    config = model.config | {"architectures": ["ToyForCausalLM"], "model_type": "toy"} | more
    weights = model.weights | {"model.norm2.weight": SECOND}
    return write_hf(ModelFiles(config, weights, model.side_files), tmp_path / "toy")


def same(left: Any, right: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


def test_it_is_read_converted_and_written_back(folder: Path, tmp_path: Path) -> None:
    config, params = load_weights(folder)
    assert isinstance(config, ToyConfig)
    assert (config.architecture, config.logit_scale) == ("toy", 2.0)
    assert config.kinds == ("full_attention",) * 2
    np.testing.assert_array_equal(params["second_norm"]["scale"], SECOND)
    convert(folder, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
    for directory in ("orbax", "hf"):
        again, loaded = load_weights(tmp_path / directory)
        assert again == config
        assert same(loaded, params)


def test_what_is_known_by_its_kind_alone_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_weights(folder)[0].architecture == "toy"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "layer_types|logit_scale"),
        ({"other_scale": 2.0}, "other_scale"),
        ({"architectures": ["Toys"]}, "LlamaForCausalLM, MistralForCausalLM, ToyForCausalLM"),
    ],
)
def test_its_keys_are_its_own(changes: dict[str, Any], named: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=named):
        load_weights(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("logit_scale", "2"), ("experts", "8"), ("kinds", "full"), ("kinds", [1]), ("more", 1)],
)
def test_a_converted_config_of_other_types_is_refused(
    key: str, value: Any, folder: Path, tmp_path: Path
) -> None:
    convert(folder, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["model"][key] = value
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        load_weights(tmp_path / "out")


def test_a_converted_model_of_an_unknown_family_is_named(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "out")
    config = (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "out" / "config.json").write_text(config.replace('"toy"', '"mamba"'))
    with pytest.raises(ConfigError, match="'mamba', wanted one of: llama, mistral, toy"):
        load_weights(tmp_path / "out")


@pytest.mark.parametrize("lacks", ["layout", "write"])
def test_what_is_not_stored_so_is_not_exported(lacks: str, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "orbax")
    only_read = replace(TOY.layouts["huggingface"], write=None)
    register(replace(TOY, layouts={"huggingface": only_read} if lacks == "write" else {}))
    with pytest.raises(CheckpointError, match="of the family toy"):
        convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_gguf_keys_are_found_under_its_name() -> None:
    metadata = {
        "general.architecture": "toy",
        "toy.context_length": 64,
        "toy.embedding_length": 32,
        "toy.block_count": 2,
        "toy.feed_forward_length": 48,
        "toy.attention.head_count": 4,
        "toy.attention.layer_norm_rms_epsilon": 1e-5,
        "toy.vocab_size": 96,
        "toy.logit_scale": 2.0,
    }
    config = read_gguf_config(GgufFile(Path("model.gguf"), metadata, {}, "float32"))
    assert (config.architecture, config.num_kv_heads) == ("toy", 4)
