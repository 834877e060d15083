"""The public core without an engine: it agrees with the engine and can be trained through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage as jp
from tests.tiny import MODEL_DIR

PROMPT = "Tom has a red"


@pytest.fixture(scope="module")
def parts() -> tuple[jp.ModelConfig, dict[str, Any], Any]:
    return jp.load(str(MODEL_DIR), dtype="float32")


def greedy_ids(
    forward: Callable[..., Any], config: jp.ModelConfig, params: Any, ids: list[int], count: int
) -> list[int]:
    """The loop of the README: one prefill, then a step a token."""
    table = [[2, 4, 1]]
    cache = jp.init_cache(config, num_blocks=4, block_size=16)
    ids = list(ids)
    step = jp.prefill_input([ids], block_tables=table, block_size=16)
    for _ in range(count):
        cache, logits = forward(params, cache, step)
        ids.append(int(logits[0].argmax()))
        step = jp.decode_input(ids[-1:], [len(ids) - 1], block_tables=table, block_size=16)
    return ids[-count:]


def prefilling(config: jp.ModelConfig, ids: list[int]) -> tuple[Any, Any, jp.StepInput]:
    """A model, an empty pool of one block, and the step that fills it."""
    step = jp.prefill_input([ids], block_tables=[[1]], block_size=16)
    return jp.build_model(config), jp.init_cache(config, num_blocks=1, block_size=16), step


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["reference", "xla"])
def test_a_loop_of_forwards_yields_the_engines_ids(
    parts: tuple[jp.ModelConfig, dict[str, Any], Any], attention: str
) -> None:
    config, params, tokenizer = parts
    model = jp.build_model(config)
    forward = jax.jit(
        lambda params, cache, step: jp.forward(model, params, cache, step, attention=attention),
        donate_argnums=1,
    )
    ids = greedy_ids(forward, config, params, tokenizer.encode(PROMPT), 20)
    llm = jp.LLM(config=config, params=params, tokenizer=tokenizer, num_blocks=16, max_num_seqs=1)
    greedy = jp.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    assert ids == list(llm.generate(PROMPT, greedy)[0].outputs[0].token_ids)
    llm.close()


@pytest.mark.slow
def test_prefill_and_decode_draw_what_forward_scores(
    parts: tuple[jp.ModelConfig, dict[str, Any], Any],
) -> None:
    config, params, tokenizer = parts
    model, cache, step = prefilling(config, tokenizer.encode(PROMPT))
    _, logits = jp.forward(model, params, cache, step)
    cache, drawn = jp.prefill(model, params, cache, step)
    assert int(drawn.token_ids[0]) == int(logits[0].argmax())
    expected = float(jax.nn.log_softmax(logits[0])[drawn.token_ids[0]])
    assert float(drawn.logprobs[0]) == pytest.approx(expected, abs=1e-5)
    step = jp.decode_input(
        [int(drawn.token_ids[0])], [int(step.context_lens[0])], [[1]], block_size=16
    )
    _, logits = jp.forward(model, params, cache, step)
    _, again = jp.decode(model, params, cache, step)
    assert again.token_ids.tolist() == [int(logits[0].argmax())]


@pytest.mark.slow
def test_sample_draws_with_settings_of_its_own(
    parts: tuple[jp.ModelConfig, dict[str, Any], Any],
) -> None:
    """Everything it takes is public: settings by constructors, a draw by its positions."""
    config, params, tokenizer = parts
    model, cache, step = prefilling(config, tokenizer.encode(PROMPT))
    _, logits = jp.forward(model, params, cache, step)
    settings = jp.sampling_input(1, temperature=30.0, top_k=50, seed=3)
    draw = jp.DrawInput(
        hidden=logits, token_ids=step.tokens[-1:], positions=step.positions[-1:] + 1
    )
    drawn = jp.sample(logits, draw, settings)
    _, prefilled = jp.prefill(model, params, cache, step, settings)
    assert drawn.token_ids.tolist() == prefilled.token_ids.tolist() != [int(logits[0].argmax())]
    edits = jp.logit_edits(1, config.vocab_size, allowed=[[7]])
    only = jp.sample(logits, draw, jp.sampling_input(1, edits=edits))
    assert only.token_ids.tolist() == [7]


@pytest.mark.slow
def test_gradients_flow_through_the_reference_attention(
    parts: tuple[jp.ModelConfig, dict[str, Any], Any],
) -> None:
    """A step along the gradient of a token's log-probability makes the token likelier."""
    config, params, tokenizer = parts
    model, cache, step = prefilling(config, tokenizer.encode(PROMPT))

    @jax.jit
    def loss(params: Any) -> jax.Array:
        _, logits = jp.forward(model, params, cache, step, attention="reference")
        return -jax.nn.log_softmax(logits[0])[9]

    before, gradient = jax.value_and_grad(loss)(params)
    norms = [float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)]
    assert all(np.isfinite(norms)) and min(norms) > 0, "every parameter has a part in the loss"
    trained = jax.tree.map(lambda leaf, slope: leaf - 0.01 * slope, params, gradient)
    assert float(loss(trained)) < float(before)
