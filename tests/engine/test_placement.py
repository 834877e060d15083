"""Params and engines have one device, and nobody else's hands on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxpage as jp
from jaxpage.engine.programs import Programs
from jaxpage.engine.sizing import size_pool
from jaxpage.terms import default_device

CONFIG = jp.ModelConfig(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=32,
)
GREEDY = jp.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
Made = tuple[tuple[int, ...], float | None]


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return jp.init_params(CONFIG, 1)


def build(params: Any) -> jp.LLM:
    return jp.LLM(config=CONFIG, params=params, block_size=4, num_blocks=8, max_num_seqs=1)


def made(llm: jp.LLM) -> Made:
    output = llm.generate([[1, 2, 3, 4, 5]], GREEDY)[0].outputs[0]
    return output.token_ids, output.cumulative_logprob


def places(llm: jp.LLM) -> set[jax.Device]:
    leaves = jax.tree.leaves((llm.runner.params, llm.runner._cache))
    return {device for leaf in leaves for device in leaf.devices()}


@pytest.fixture(scope="module")
def wanted(params: dict[str, Any]) -> Made:
    return made(build(params))


@pytest.mark.slow
@pytest.mark.parametrize("updated", [False, True], ids=["built with", "updated to"])
def test_numpy_params_are_copied_and_jax_ones_are_not(
    params: dict[str, Any], wanted: Made, updated: bool
) -> None:
    mine = jax.tree.map(np.array, params)
    llm = build(jax.tree.map(jnp.zeros_like, params) if updated else mine)
    if updated:
        llm.update_params(mine)
    for leaf in jax.tree.leaves(mine):
        leaf *= 0.5  # the trainer's next step
    assert made(llm) == wanted
    llm.update_params(params)
    pairs = zip(jax.tree.leaves(llm.runner.params), jax.tree.leaves(params), strict=True)
    assert all(one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer() for one, other in pairs)


def spread(params: Any, spec: PartitionSpec) -> Any:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return jax.device_put(params, NamedSharding(mesh, spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    "move",
    [
        lambda tree: jax.device_put(tree, jax.devices()[1]),
        lambda tree: spread(tree, PartitionSpec()),
        lambda tree: jax.device_put(
            tree, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        ),
        lambda tree: {**tree, "embed": spread(tree["embed"], PartitionSpec("data"))},
    ],
    ids=["another device", "replicated", "pinned", "sharded"],
)
def test_params_elsewhere_are_placed_at_once(
    params: dict[str, Any], wanted: Made, move: Callable[[Any], Any]
) -> None:
    llm = build(move(params))
    assert places(llm) == {jax.devices()[0]} and made(llm) == wanted
    llm.update_params(move(params))
    assert places(llm) == {jax.devices()[0]} and made(llm) == wanted


@pytest.mark.slow
def test_an_engine_stays_on_the_default_device_of_its_making(
    params: dict[str, Any], wanted: Made
) -> None:
    second = jax.devices()[1]
    with jax.default_device(second):
        llm = build(params)
    assert places(llm) == {second}
    assert made(llm) == wanted, "outside of the context"
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert made(llm) == wanted
    assert places(llm) == {second}


def test_what_fits_is_asked_of_the_placements_device(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend, the dtype, the free memory and the costs are those of the default device."""
    second = jax.devices()[1]
    asked = []

    def size(*args: Any, **kwargs: Any) -> jp.CacheConfig:
        asked.append(default_device())
        return size_pool(*args, **kwargs)

    monkeypatch.setattr("jaxpage.engine.build.size_pool", size)
    placement = jp.Placement(second)
    llm = jp.LLM(config=CONFIG, params=params, placement=placement, num_blocks=8, max_num_seqs=1)
    assert asked == [second] and places(llm) == {second}
    assert default_device() == jax.devices()[0]


def test_an_engine_runs_in_contexts_that_came_later(params: dict[str, Any], wanted: Made) -> None:
    llm = build(params)
    with jax.default_device(jax.devices()[1]), jax.disable_jit(), jax.transfer_guard("disallow"):
        assert made(llm) == wanted
    assert places(llm) == {jax.devices()[0]}


def test_both_doors_check_the_tree_and_keep_what_they_have(
    params: dict[str, Any], wanted: Made
) -> None:
    wrong = {**params, "lora": jnp.zeros(3)}
    with pytest.raises(jp.ConfigError, match="with 'lora'"):
        build(wrong)
    llm = build({"params": params})
    with pytest.raises(jp.ConfigError, match="with 'lora'"):
        llm.update_params(wrong)
    assert made(llm) == wanted


def test_programs_are_traced_under_the_callers_settings() -> None:
    seen = []

    def lower() -> Any:
        seen.append(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]  # made at run time
        return jax.jit(lambda: jnp.zeros(3)).lower()

    programs = Programs()
    with jax.default_matmul_precision("bfloat16"):
        programs.expect("a", "a", lower)
    programs.get("a", "a", lower)
    programs.close()
    assert seen == ["bfloat16"]
