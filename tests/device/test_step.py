"""Forward passes and draws with a toy model: however a sequence is cut, the same comes out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpage import functional
from jaxpage.backends import PLAIN
from jaxpage.device import step as steps
from jaxpage.device.inputs import decode_input, prefill_input
from jaxpage.device.kv_cache import init_cache
from jaxpage.device.ops import Model
from jaxpage.device.sampling.settings import sampling_input
from jaxpage.device.types import KVCache, StepInput, StepShape, pack, unpack
from tests.device.toy import CONFIG, Toy, init_params

MODEL, PARAMS = Toy(), init_params()
A, B = [3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1]
TABLES = [[4, 2, 5], [1]]
SIZE = 4
V = CONFIG.vocab_size


def _cache() -> KVCache:
    return init_cache(CONFIG, num_blocks=6, block_size=SIZE)


@partial(jax.jit, static_argnames="attention")
def _forward(cache: KVCache, step: StepInput, attention: str = "xla") -> tuple[KVCache, Array]:
    return functional.forward(MODEL, PARAMS, cache, step, attention=attention)


def _whole() -> np.ndarray:
    """Logits after A and after B, by one prefill with the oracle's attention."""
    _, logits = _forward(_cache(), prefill_input([A, B], TABLES, SIZE), attention="reference")
    return np.asarray(logits)


def test_the_toy_is_a_model() -> None:
    assert isinstance(MODEL, Model)


@pytest.mark.slow
def test_a_prompt_in_two_steps_beside_another_gives_the_same_logits() -> None:
    cache, _ = _forward(_cache(), prefill_input([A[:5]], [TABLES[0]], SIZE, num_tokens=8))
    mixed = prefill_input([A[5:], B], TABLES, SIZE, starts=[5, 0], num_tokens=12, num_rows=3)
    _, logits = _forward(cache, mixed)
    np.testing.assert_allclose(logits[:2], _whole(), atol=1e-5)


def test_decoding_token_by_token_gives_the_same_logits() -> None:
    cache = _cache()
    last = {}
    for position in range(len(A)):
        tokens, places, tables = [A[position]], [position], [TABLES[0]]
        if position < len(B):
            tokens, places, tables = [*tokens, B[position]], [*places, position], TABLES
        step = decode_input(tokens, places, tables, SIZE, num_rows=4, table_width=3)
        cache, logits = _forward(cache, step)
        last |= dict(enumerate(np.asarray(logits)[: len(tokens)]))
    np.testing.assert_allclose([last[0], last[1]], _whole(), atol=1e-5)


@pytest.mark.slow
def test_a_generation_loop_takes_the_argmax_of_the_whole_sequence() -> None:
    prefill = jax.jit(partial(functional.prefill, MODEL))
    decode = jax.jit(partial(functional.decode, MODEL, attention="reference"))
    cache, out = prefill(PARAMS, _cache(), prefill_input([B], [[1, 3]], SIZE))
    tokens = [*B, int(out.token_ids[0])]
    for _ in range(3):
        step = decode_input([tokens[-1]], [len(tokens) - 1], [[1, 3]], SIZE)
        cache, out = decode(PARAMS, cache, step)
        tokens.append(int(out.token_ids[0]))
    for length in range(len(B), len(tokens)):
        step = prefill_input([tokens[:length]], [[1, 3]], SIZE, num_tokens=8)
        _, logits = _forward(_cache(), step)
        assert tokens[length] == int(logits[0].argmax())


@pytest.mark.slow
def test_a_token_in_flight_feeds_the_next_step() -> None:
    """token_source d + 1 replaces the row's last token, in decode and in prefill rows."""
    previous = jnp.array([11, 22, 33], jnp.int32)
    given = decode_input([0, 5, 0], [2, 2, 2], [[1], [2], [3]], SIZE, num_rows=4)
    given = replace(given, token_source=jnp.array([3, 0, 1, 0], jnp.int32))
    known = decode_input([33, 5, 11], [2, 2, 2], [[1], [2], [3]], SIZE, num_rows=4)
    _assert_same_step(given, known, previous, live=3)
    rows, tables = [[6, 7, 0], [8, 0]], [[1], [2]]
    given = prefill_input(rows, tables, SIZE, num_tokens=8)
    given = replace(given, token_source=jnp.array([2, 0], jnp.int32))
    known = prefill_input([[6, 7, 22], [8, 0]], tables, SIZE, num_tokens=8)
    _assert_same_step(given, known, previous, live=5)


def _assert_same_step(given: StepInput, known: StepInput, previous: Array, live: int) -> None:
    run = jax.jit(partial(steps.hidden_step, MODEL, backend=PLAIN))
    _, draw, hidden = run(PARAMS, _cache(), given, previous)
    _, want_draw, want = run(PARAMS, _cache(), known, previous)
    np.testing.assert_array_equal(draw.token_ids, want_draw.token_ids)
    np.testing.assert_array_equal(draw.positions, want_draw.positions)
    np.testing.assert_array_equal(hidden[:live], want[:live])


@pytest.mark.slow
def test_a_packed_step_with_a_donated_cache_updates_in_place() -> None:
    step = jax.device_get(prefill_input([A, B], TABLES, SIZE, num_tokens=16, num_rows=3))
    shape = StepShape.of(step)

    def run(params: Any, cache: KVCache, vector: Array, previous: Array) -> Any:
        step = unpack(vector, shape)
        return steps.hidden_step(MODEL, params, cache, step, previous, backend=PLAIN)

    cache = init_cache(CONFIG, num_blocks=4000, block_size=SIZE)
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    arguments = (PARAMS, cache, jnp.asarray(pack(step)), jnp.zeros(3, jnp.int32))
    compiled = jax.jit(run, donate_argnums=1).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes
    _, draw, _ = compiled(*arguments)
    assert draw.token_ids.tolist() == [A[-1], B[-1], A[0]]
    assert draw.positions.tolist()[:2] == [len(A), len(B)]


@pytest.mark.slow
def test_draw_samples_with_the_models_logits() -> None:
    step = prefill_input([A, B], TABLES, SIZE)
    run = jax.jit(partial(steps.hidden_step, MODEL, backend=PLAIN))
    _, given, _ = run(PARAMS, _cache(), step, jnp.zeros(1, jnp.int32))
    draw = jax.jit(partial(steps.draw, MODEL, backend=PLAIN), static_argnames="num_token_ids")
    settings = sampling_input(2, temperature=[0.0, 1.0], top_k=[0, 1])
    for count in (V, 5):
        out = draw(PARAMS, given, settings, num_token_ids=count)
        np.testing.assert_array_equal(out.token_ids, _whole()[:, :count].argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("slice_rows", [4, 64])
def test_prompt_log_probabilities_are_those_of_the_logits(slice_rows: int) -> None:
    hidden = jax.random.normal(jax.random.key(1), (9, 16))
    targets = jnp.arange(9, dtype=jnp.int32) * 3
    got, ids, best = steps.prompt_logprobs(
        MODEL,
        PARAMS,
        hidden,
        targets,
        backend=PLAIN,
        num_top=4,
        slice_rows=slice_rows,
        num_token_ids=30,
    )
    want = np.asarray(jax.nn.log_softmax((hidden @ PARAMS["head"])[:, :30]))
    np.testing.assert_allclose(got, want[np.arange(9), targets], atol=1e-5)
    np.testing.assert_allclose(best, np.sort(want)[:, ::-1][:, :4], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(want, np.asarray(ids), 1), best, atol=1e-5)


def test_prompt_log_probabilities_never_hold_all_logits() -> None:
    run = partial(steps.prompt_logprobs, MODEL, backend=PLAIN, num_top=4, slice_rows=16)
    hidden = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((4096,), jnp.int32)
    memory = jax.jit(run).lower(PARAMS, hidden, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * 4096 * V * 4


@pytest.mark.slow
def test_gradients_go_through_the_reference() -> None:
    step = prefill_input([A, B], TABLES, SIZE)

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any) -> Array:
        _, logits = functional.forward(MODEL, params, _cache(), step, attention="reference")
        return jax.nn.log_softmax(logits)[:, 7].sum()

    value, gradients = loss(PARAMS)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    nudged = jax.tree.map(lambda p, g: p + 1e-3 * g, PARAMS, gradients)
    gained = float(loss(nudged)[0] - value)
    expected = 1e-3 * sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(gained, expected, rtol=0.1)
