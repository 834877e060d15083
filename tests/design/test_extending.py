"""The six how-tos of docs/design/extending.md, as they stand on the page: what each promises."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage as jp
from jaxpage.models.registry import FAMILIES
from tests.helpers.formats import ModelFiles, variant, write_hf
from tests.helpers.snippets import block, run_python
from tests.tiny import MODEL_DIR

pytestmark = pytest.mark.slow
PAGE = "docs/design/extending.md"
GREEDY = jp.SamplingParams(temperature=0, max_tokens=12)


def run(name: str) -> dict[str, Any]:
    """What the block of this name leaves, run on the tiny model."""
    code = block(PAGE, name)
    names: dict[str, Any] = {}
    run_python(code._replace(text=code.text.replace("smollm2-135m", str(MODEL_DIR))), names)
    return names


def tiny_text() -> str:
    llm = jp.LLM(str(MODEL_DIR), num_blocks=64)
    text = llm.generate("Tom has a red", GREEDY)[0].outputs[0].text
    llm.close()
    return text


def test_a_family_with_norms_on_q_and_k(tmp_path: Path) -> None:
    try:
        names = run("family")
        _check_family(names, tmp_path)
    finally:
        FAMILIES.pop("qk_norm", None)


def _check_family(names: dict[str, Any], folder: Path) -> None:
    params, tokens = names["params"], names["tokens"]
    assert len(tokens) == 8
    norm = {"scale": params["layers_0"]["attention"]["q_norm"]["scale"] * 3}
    louder = {**params["layers_0"]["attention"], "q_norm": norm}
    changed = {**params, "layers_0": {**params["layers_0"], "attention": louder}}
    llm = names["llm"]
    llm.update_params(changed)
    scored = llm.generate([[5, 9, 17]], jp.SamplingParams(temperature=0, logprobs=0))[0].outputs[0]
    llm.update_params(params)
    again = llm.generate([[5, 9, 17]], jp.SamplingParams(temperature=0, logprobs=0))[0].outputs[0]
    assert scored.cumulative_logprob != again.cumulative_logprob, "the norm has a part in it"

    model = variant("gqa")  # read from files, by the rows that the block registered
    size = model.config["hidden_size"] // model.config["num_attention_heads"]
    config = model.config | {"architectures": ["QkNormForCausalLM"], "model_type": "qk_norm"}
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": np.full(size, 2 + layer, np.float32)
        for layer in range(model.config["num_hidden_layers"])
        for name in ("q_norm", "k_norm")
    }
    files = ModelFiles(config, model.weights | norms, model.side_files)
    read, loaded, _ = jp.load(write_hf(files, folder / "model"))
    assert isinstance(read, names["QkNormConfig"])
    assert loaded["layers_1"]["attention"]["k_norm"]["scale"].tolist() == [3.0] * size


@pytest.mark.torch
def test_the_family_computes_what_transformers_does() -> None:
    """Qwen3 is a Llama with norms on q and k."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    try:
        names = run("family")
        config, params = names["config"], names["params"]
        norms = jax.random.uniform(jax.random.key(3), (2, config.num_layers, 16), minval=0.5)
        for layer in range(config.num_layers):
            attention = params[f"layers_{layer}"]["attention"]
            attention["q_norm"] = {"scale": norms[0, layer]}
            attention["k_norm"] = {"scale": norms[1, layer]}
        theirs = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                attn_implementation="eager",
            )
        ).eval()  # fmt: skip
        state = {name: torch.tensor(np.asarray(leaf)) for name, leaf in _stored(config, params)}
        missing, surplus = theirs.load_state_dict(state, strict=False)
        assert not missing and not surplus
        ids = [5, 9, 17, 250, 31, 7]
        with torch.no_grad():
            want = theirs(torch.tensor([ids])).logits[0, -1].numpy()
        step = jp.prefill_input([ids], [[1, 2]], 4)
        model = jp.build_model(config)
        _, got = jp.forward(model, params, jp.init_cache(config, 4, 4), step)
        np.testing.assert_allclose(got[0], want, atol=2e-5)
        assert np.abs(want).max() > 0.05
    finally:
        FAMILIES.pop("qk_norm", None)


def _stored(config: jp.ModelConfig, params: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parameters as Hugging Face names and shapes them."""
    groups, size = config.group_size, config.hidden_size
    found = [
        ("model.embed_tokens.weight", params["embed"]["embedding"]),
        ("model.norm.weight", params["final_norm"]["scale"]),
        ("lm_head.weight", params["lm_head"]["kernel"]),
    ]
    for layer in range(config.num_layers):
        own, prefix = params[f"layers_{layer}"], f"model.layers.{layer}."
        qkv = own["attention"]["qkv"]["kernel"]
        gate, up = own["mlp"]["gate_up"]["kernel"]
        for name, leaf in (
            ("input_layernorm", own["input_norm"]["scale"]),
            ("post_attention_layernorm", own["post_attention_norm"]["scale"]),
            ("self_attn.q_proj", qkv[:, :groups].reshape(-1, size)),
            ("self_attn.k_proj", qkv[:, groups].reshape(-1, size)),
            ("self_attn.v_proj", qkv[:, groups + 1].reshape(-1, size)),
            ("self_attn.o_proj", own["attention"]["out"]["kernel"]),
            ("self_attn.q_norm", own["attention"]["q_norm"]["scale"]),
            ("self_attn.k_norm", own["attention"]["k_norm"]["scale"]),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("mlp.down_proj", own["mlp"]["down"]["kernel"]),
        ):
            found.append((f"{prefix}{name}.weight", leaf))
    return found


def test_a_stage_of_the_sampler() -> None:
    names = run("stage")
    assert names["with_echo"] == (5,) * 6
    without = names["without"]
    assert without[0] == 5 and all(a != b for a, b in pairwise(without))


def test_a_backend() -> None:
    names = run("backend")
    assert names["text"] == tiny_text()
    step = jp.prefill_input([[5, 9]], [[1]], 4)
    config, params, _ = jp.load(str(MODEL_DIR))
    model, cache = jp.build_model(config), jp.init_cache(config, 2, 4)

    def forward(params: Any, cache: Any, step: jp.StepInput) -> Any:
        return jp.forward(model, params, cache, step, attention=names["Named"](scope="mine"))

    lowered = jax.jit(forward).lower(params, cache, step)
    assert "mine" in lowered.as_text(debug_info=True), "its products are those that run"


def test_a_drafter_that_guesses() -> None:
    names = run("drafter")
    assert names["good"] == names["bad"] == names["plain"] and len(set(names["plain"])) > 8
    assert names["good_steps"] < names["plain_steps"] / 3
    assert names["bad_steps"] <= names["plain_steps"]


def test_an_adapter_by_row() -> None:
    names = run("adapter")
    config, params, _ = jp.load(str(MODEL_DIR))
    llm = jp.LLM(config=config, params=params, num_blocks=64)
    prompt, greedy = [5, 9, 17, 33], jp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert names["tokens"]["without"] == llm.generate([prompt], greedy)[0].outputs[0].token_ids
    kernel = params["layers_1"]["attention"]["out"]["kernel"]
    merged = kernel + names["up"][1] @ names["down"][1]
    attention = {**params["layers_1"]["attention"], "out": {"kernel": merged}}
    llm.update_params({**params, "layers_1": {**params["layers_1"], "attention": attention}})
    with_it = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    assert names["tokens"]["with"] == with_it != names["tokens"]["without"]
    with pytest.raises(jp.RequestError, match="adapter=2"):
        names["llm"].engine.add_request("c", prompt, greedy, adapter=2)


def test_a_placement_over_two_devices() -> None:
    names = run("placement")
    one, two = np.asarray(names["one_device"]), np.asarray(names["two_devices"])
    np.testing.assert_allclose(two, one, atol=1e-5)
    assert np.abs(one).max() > 1
    cut = names["placement"].put_params(names["params"])["layers_0"]["attention"]["qkv"]["kernel"]
    whole = names["params"]["layers_0"]["attention"]["qkv"]["kernel"]
    assert {shard.data.shape[0] for shard in cut.addressable_shards} == {whole.shape[0] // 2}
    assert jnp.array_equal(cut, whole)
    assert names["text"] == tiny_text()
