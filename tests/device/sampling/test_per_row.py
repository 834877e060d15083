"""Work for the rows that ask: the CPU's loop and the other devices' batch are the same function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.sampling import per_row, sample
from jaxpage.device.sampling.settings import sampling_input

ASKED = jnp.array([False, True, True, False, True])
FORMS = (per_row._loop_over, per_row._all_at_once)


@pytest.mark.parametrize("form", FORMS)
def test_only_rows_that_ask_are_replaced(form: object) -> None:
    x = jnp.arange(10.0).reshape(5, 2)
    factor = jnp.arange(1.0, 6)
    default = {"row": x, "sum": jnp.zeros(5)}

    def compute(row: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
        return {"row": row * factor, "sum": row.sum()}

    got = jax.jit(form(compute))(ASKED, default, (x, factor))
    np.testing.assert_array_equal(got["row"], [[0, 1], [4, 6], [12, 15], [6, 7], [40, 45]])
    np.testing.assert_array_equal(got["sum"], [0, 5, 9, 0, 17])


@pytest.mark.parametrize("form", FORMS)
def test_a_row_nobody_asked_for_is_not_computed(form: object) -> None:
    """Nobody asks: nothing runs. (A callback counts.)"""
    calls = []

    def compute(row: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return -row

    run = jax.jit(form(compute))
    x = jnp.arange(5.0)
    np.testing.assert_array_equal(run(jnp.zeros(5, bool), x, (x,)), x)
    jax.effects_barrier()
    assert not calls
    run(ASKED, x, (x,)).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == 3 if form is per_row._loop_over else calls


@pytest.mark.slow
def test_both_forms_draw_the_same_tokens() -> None:
    logits = jax.random.normal(jax.random.key(2), (5, 300)) * 3
    settings = sampling_input(
        5, temperature=1.0, top_k=[0, 5, 100, 0, 0], top_p=[1, 1, 0.9, 1, 0.8], seed=[*range(5)]
    )
    greedy = sample.Drawn(
        token_ids=jnp.zeros(5, jnp.int32),
        logprobs=jnp.zeros(5),
        top_ids=jnp.zeros((5, 2), jnp.int32),
        top_logprobs=jnp.zeros((5, 2)),
    )
    positions = jnp.arange(5, dtype=jnp.int32)
    a, b = (
        jax.jit(form(sample._draw_row))(ASKED, greedy, (logits, greedy, settings, positions))
        for form in FORMS
    )
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert (np.asarray(a.token_ids)[~np.asarray(ASKED)] == 0).all()
