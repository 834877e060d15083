"""Where arrays live: one device, or two under rules; and an engine on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpage as jp
from jaxpage.device.placement import Placement
from tests.models.toys import toy_config

CONFIG = toy_config(max_position_embeddings=32, vocab_size=64)
HEADS = PartitionSpec(None, None, "model")
RULES = (
    (r"qkv/kernel", PartitionSpec("model")),
    (r"attention/out/kernel", PartitionSpec(None, "model")),
    (r"gate_up/kernel", PartitionSpec(None, "model")),
    (r"down/kernel", PartitionSpec(None, "model")),
    (r"lm_head/kernel", PartitionSpec("model")),
    (r"", PartitionSpec()),
)


def on_mesh(**changes: Any) -> Placement:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    return Placement(**{"mesh": mesh, "rules": RULES, "pool": HEADS, **changes})


def test_without_a_mesh_all_lies_on_one_device() -> None:
    second = jax.devices()[1]
    place = Placement(second)
    for tree in (
        place.put({"a": np.ones(3)}),
        place.put_params({"a": np.ones(3)}),
        place.put_pool(lambda: jp.init_cache(CONFIG, 2, 4)),
    ):
        assert {d for leaf in jax.tree.leaves(tree) for d in leaf.devices()} == {second}
    assert Placement().first_device == jax.devices()[0]


def test_rules_need_a_mesh_and_every_parameter_a_rule() -> None:
    for given in ({"rules": RULES}, {"pool": HEADS}):
        with pytest.raises(jp.ConfigError, match="mesh"):
            Placement(**given)
    with pytest.raises(jp.ConfigError, match="final_norm/scale"):
        on_mesh(rules=RULES[:-1]).put_params({"final_norm": {"scale": np.ones(3)}})


@pytest.mark.slow
def test_a_step_on_two_devices_gives_the_same_logits() -> None:
    model, params = jp.build_model(CONFIG), jp.init_params(CONFIG, 2)
    step = jax.device_get(jp.prefill_input([[1, 2, 3], [4]], [[1], [2]], 8))
    _, want = jp.forward(model, params, jp.init_cache(CONFIG, 300, 8), jax.device_put(step))
    place = on_mesh()
    pool = place.put_pool(lambda: jp.init_cache(CONFIG, 300, 8))
    assert all(leaf.sharding.spec == HEADS for leaf in jax.tree.leaves(pool))
    shard = pool[0].k.addressable_shards[0].data
    assert shard.shape[2] * 2 == CONFIG.num_kv_heads

    @jax.jit
    def forward(params: Any, pool: Any, step: Any) -> Any:
        return jp.forward(model, params, pool, step)

    given = (place.put_params(params), pool, place.put(step))
    assert "all-reduce" in forward.lower(*given).compile().as_text()
    after, got = forward(*given)
    assert all(leaf.sharding.spec[2] == "model" for leaf in jax.tree.leaves(after))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_an_engine_on_a_mesh_draws_the_same_tokens() -> None:
    from jaxpage.engine.build import build
    from jaxpage.engine.options import EngineOptions
    from jaxpage.engine.runner import Runner

    params = jp.init_params(CONFIG, 2)
    options = EngineOptions(attention="xla", block_size=4, num_blocks=16, max_num_seqs=2)
    greedy = jp.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = []
    for placement in (None, on_mesh()):
        engine = build(options, config=CONFIG, params=params, placement=placement)
        engine.add_request("a", [1, 2, 3, 4, 5], greedy)
        tokens: tuple[int, ...] = ()
        while engine.has_unfinished:
            for update in engine.updates():
                tokens += update.token_ids
        found.append(tokens)
        if placement is not None:
            assert isinstance(engine.device, Runner)
            for leaf in engine.device._cache:
                assert leaf.sharding.spec[2] == "model"
    assert found[0] == found[1] and len(found[0]) == 5


def test_a_cut_that_does_not_come_out_even_names_the_parameter() -> None:
    rules = ((r"", PartitionSpec("model")),)
    with pytest.raises(jp.ConfigError, match=r"'head/kernel' of shape \(3, 2\)"):
        on_mesh(rules=rules).put_params({"head": {"kernel": np.ones((3, 2))}})


@pytest.mark.slow
def test_what_a_mesh_puts_out_it_takes_again() -> None:
    """Samples, blocks that are copied and swapped, scored prompts: each program feeds another."""
    params = jp.init_params(CONFIG, 2)
    sampled = jp.SamplingParams(n=2, seed=3, max_tokens=16, ignore_eos=True, prompt_logprobs=1)
    found = []
    for placement in (None, on_mesh()):
        llm = jp.LLM(
            config=CONFIG,
            params=params,
            placement=placement,
            attention="xla",
            block_size=4,
            num_blocks=10,
            swap_blocks=16,
            preemption="swap",
            max_num_seqs=4,
        )
        outputs = llm.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9]], sampled, raise_on_error=True)
        found.append([each.token_ids for output in outputs for each in output.outputs])
        assert llm.stats().preemptions_swap
    assert found[0] == found[1]
