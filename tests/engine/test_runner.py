"""The device's owner: what it hands to its programs and reads of them, and its end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, ConfigError, Quantized, SamplingParams
from jaxpage.device.step import pack_draws
from jaxpage.device.types import StepOutput, StepShape
from jaxpage.engine.batch import to_result
from jaxpage.host.plan import Draw, PlannedRow, StepPlan
from jaxpage.models.registry import build_model, init_params
from tests.models.toys import logits_of, toy_config
from tests.tiny import MODEL_DIR


def test_a_closed_engine_says_so() -> None:
    llm = LLM(MODEL_DIR, num_blocks=4, max_model_len=64, max_num_seqs=1)
    llm.close()
    llm.close()
    llm.engine.add_request("a", "Tom", SamplingParams())
    for call in (llm.engine.step, lambda: llm.generate("Tom")):
        with pytest.raises(ConfigError, match=r"got a call after close\(\)"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_draws_read_no_more_than_the_models_head(is_tied: bool) -> None:
    config = toy_config(tie_word_embeddings=is_tied)
    model, params = build_model(config), init_params(config)
    assert model.head == (("embed",) if is_tied else ("lm_head",))
    hidden = jnp.ones((2, config.hidden_size))
    head = {name: params[name] for name in model.head}
    np.testing.assert_array_equal(logits_of(model, head, hidden), logits_of(model, params, hidden))


@pytest.mark.slow
def test_new_weights_have_the_form_of_the_old() -> None:
    config = toy_config()
    params = init_params(config)
    llm = LLM(config=config, params=params, num_blocks=8, max_model_len=32, max_num_seqs=1)
    table = params["embed"]["embedding"]
    scales = jnp.ones((table.shape[0], 1), table.dtype)
    quantized = Quantized(table.astype(jnp.int8), scales, group=table.shape[1])
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    wanted = llm.generate([[1, 2]], greedy)[0].outputs
    with pytest.raises(ConfigError, match=r"quantised in groups .*embed/embedding.* an array"):
        llm.update_params({**params, "embed": {"embedding": quantized}})
    assert llm.generate([[1, 2]], greedy)[0].outputs == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "name", "shapes", "says"),
    [
        ("layer_0", "out", ((2, 1, 8), (2, 8, 1)), "adapter of layer_0/out, wanted"),
        ("layers_0", "o_proj", ((2, 1, 8), (2, 8, 1)), "layers_0/o_proj, wanted"),
        ("layers_0", "down", ((2, 1, 8), (2, 8, 1)), "of shapes"),
        ("layers_0", "out", ((2, 1, 8), (3, 8, 1)), "of shapes"),
        ("layers_0", "out", ((2, 1, 8), (2, 8, 1)), "that is not zeros"),
    ],
)
def test_an_adapter_that_fits_nothing_is_refused(
    layer: str, name: str, shapes: tuple[tuple[int, ...], ...], says: str
) -> None:
    config = toy_config(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4)
    assert config.intermediate_size != 8
    adapters = {layer: {name: tuple(np.ones(shape, np.float32) for shape in shapes)}}
    with pytest.raises(ConfigError, match=says):
        LLM(config=config, params=init_params(config), adapters=adapters, num_blocks=4)


def test_a_packed_draw_comes_back_whole() -> None:
    values = np.array([-0.0, -1e-45, -np.inf, np.nan], np.float32)
    ids = jnp.array([3, 0, 2**31 - 1, 7], jnp.int32)
    none = jnp.zeros((4, 0))
    output = StepOutput(ids, jnp.asarray(values), jnp.asarray(values[::-1]), none, none)
    drawn = np.asarray(pack_draws(output, 6))
    draws = tuple(Draw(i, 0, 0, SamplingParams(), 1, ()) for i in range(4))
    rows = tuple(PlannedRow(i, (5,), None, 0, 1, (1,), 1, (draws[i],)) for i in range(4))
    plan, shape = StepPlan(1, rows, num_single=4), StepShape(4, 4, 1, 4, num_single=4)
    result = to_result(plan, shape, drawn, None, None)
    assert drawn.shape == (3, 6) and not drawn[:, 4:].any()
    assert result.token_ids == ids.tolist()
    np.testing.assert_array_equal(np.float32(result.logprobs), values)
    np.testing.assert_array_equal(np.float32(result.raw_logprobs), values[::-1])
    assert np.signbit(result.logprobs[0])
