"""The contract of every attention backend: one suite, poisoned pools, a float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.backends import as_backend
from jaxpage.config import AttentionSpec
from jaxpage.device.types import LayerKV
from jaxpage.errors import ConfigError
from tests.backends.attention_cases import (
    TOLERANCES,
    Case,
    build,
    jitted,
    run,
    swapped,
    worst_error,
)

BACKENDS = ("reference", "xla")
S = 4
EDGES = (0, 1, S - 1, S, S + 1, 3 * S + 2)
DECODE = tuple((context, min(context, 1)) for context in EDGES)
LONG = 300  # several chunks of any backend, for a decode row and for a prefill row

CASES = {
    "decode edges": Case(rows=DECODE, group=3, spare_rows=2),
    "decode long beside short": Case(rows=((LONG, 1), (2, 1), (0, 0), (70, 1)), block_size=16),
    "decode one row": Case(rows=((9, 1),), num_kv_heads=1, group=8),
    "decode block size 1": Case(rows=((5, 1), (130, 1)), block_size=1, group=4),
    "decode block size 7": Case(rows=((7, 1), (8, 1), (90, 1)), block_size=7, head_dim=5),
    "decode window": Case(rows=((LONG, 1), (3, 1), (40, 1)), block_size=7, window=17),
    "prefill edges": Case(rows=tuple((c, c) for c in EDGES), group=3, spare_tokens=5, window=1),
    "prefill long": Case(rows=((LONG, LONG), (3, 3)), block_size=16, num_kv_heads=3, group=3),
    "prefill behind a prefix": Case(rows=((LONG, 70), (9, 2), (8, 8)), block_size=7, group=4),
    "prefill window": Case(rows=((LONG, 90), (30, 30), (5, 1)), block_size=16, window=20),
    "mixed": Case(rows=((50, 1), (23, 9), (0, 0), (17, 17), (1, 1)), spare_rows=2, spare_tokens=3),
    "mixed block size 1": Case(rows=((70, 1), (20, 5)), block_size=1, num_kv_heads=1, group=8),
    "mixed step": Case(
        rows=((50, 1), (1, 1), (23, 9), (0, 0), (17, 17)),
        num_single=4,
        group=3,
        spare_rows=1,
        spare_tokens=3,
    ),
    "mixed step window": Case(
        rows=((LONG, 1), (90, 40)), num_single=1, window=17, spare_tokens=1, block_size=7
    ),
    "shared": Case(
        rows=((LONG, 1), (270, 1), (9, 1), (260, 1), (31, 1), (40, 1), (0, 0)),
        groups=(((0, 1, 3), 256), ((4, 5), 28)),
        group=3,
        spare_rows=2,
    ),
    "shared by more than a tile": Case(
        rows=tuple((70 + row, 1) for row in range(19)), groups=((tuple(range(19)), 64),)
    ),
    "shared window": Case(
        rows=((LONG, 1), (200, 1), (170, 1)), groups=(((0, 1, 2), 168),), window=60, block_size=7
    ),
    "soft cap decode": Case(rows=((LONG, 1), (9, 1), (0, 0)), group=3, soft_cap=0.5, spare_rows=1),
    "soft cap shared": Case(
        rows=((LONG, 1), (270, 1), (9, 1)), groups=(((0, 1), 256),), window=200, soft_cap=0.5
    ),
    "soft cap mixed": Case(
        rows=((50, 1), (90, 40), (17, 17)), num_single=2, window=17, soft_cap=0.5, spare_tokens=2
    ),
    "bfloat16": Case(rows=((LONG, 1), (20, 20)), dtype="bfloat16", group=3, block_size=16),
    "bfloat16 decode": Case(rows=((LONG, 1), (20, 1)), dtype="bfloat16", group=3, block_size=16),
    "float16": Case(rows=((LONG, 1), (20, 20)), dtype="float16", group=3, block_size=16),
}


REFERENCE = (
    "decode edges",
    "decode window",
    "mixed",
    "mixed step",
    "shared",
    "prefill window",
    "soft cap decode",
    "soft cap mixed",
    "bfloat16",
    "float16",
)
BATCH = (
    "shared",
    "shared window",
    "decode edges",
    "decode long beside short",
    "decode window",
    "soft cap decode",
    "soft cap shared",
    "bfloat16 decode",
)
PALLAS = (  # interpreted here; tests/pallas_kernels holds the kernels themselves to more
    "decode edges",
    "decode block size 7",
    "decode window",
    "prefill edges",
    "prefill window",
    "mixed",
    "mixed step",
    "mixed step window",
    "shared",
    "shared by more than a tile",
    "shared window",
    "soft cap decode",
    "soft cap mixed",
    "bfloat16",
)
CHECKS = (
    *(("xla", name) for name in CASES),
    *(("pallas", name) for name in PALLAS),
    *(("reference", name) for name in REFERENCE),
    *(("batch", name) for name in BATCH),
)
QUICK = (("xla", "decode edges"), ("xla", "mixed step"), ("xla", "shared"))
"""The rest is marked slow."""


@pytest.mark.parametrize(
    ("backend", "name"),
    [check if check in QUICK else pytest.param(*check, marks=pytest.mark.slow) for check in CHECKS],
)
def test_equals_dense_attention(backend: str, name: str) -> None:
    case = CASES[name]
    problem = build(case)
    assert worst_error(run(backend, case, problem), problem) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_empty_rows_give_exactly_zero(backend: str) -> None:
    for name in ("decode edges", "mixed", "mixed step", "shared"):
        case = CASES[name]
        problem = build(case)
        live = np.concatenate(list(problem.tokens.values()))
        live = [token for token in live if problem.expected[token].any()]
        dead = np.setdiff1d(np.arange(case.num_tokens), live)
        assert dead.size >= 2
        assert not run(backend, case, problem)[dead].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode edges", "mixed", "mixed step", "shared", "bfloat16"])
def test_the_tolerance_would_notice(name: str) -> None:
    case = CASES[name]
    problem = build(case)
    tolerance = TOLERANCES[case.dtype]
    good = run("xla", case, problem)
    assert worst_error(np.zeros_like(good), problem) > 10 * tolerance
    assert worst_error(run("xla", case, swapped(problem)), problem) > 10 * tolerance
    assert worst_error(good, build(replace(case, causal_shift=-1))) > 5 * tolerance
    assert worst_error(good, build(replace(case, window=5))) > 5 * tolerance
    assert worst_error(good, build(replace(case, soft_cap=1.0))) > 5 * tolerance
    nan = good.copy()
    nan[0, 0, 0] = np.nan
    assert worst_error(nan, problem) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode long beside short", "mixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_padding_change_nothing(backend: str, name: str) -> None:
    case = CASES[name]
    order = tuple(np.random.default_rng(3).permutation(len(case.rows)).tolist())
    other = replace(case, order=order, spare_rows=4, spare_width=9)
    first, second = build(case), build(other)
    a, b = run(backend, case, first), run(backend, other, second)
    for row in range(len(case.rows)):
        got, want = b[second.tokens[row]], a[first.tokens[row]]
        is_exact = backend == "xla" and case.is_decode  # one row at a time, always the same way
        np.testing.assert_allclose(got, want, rtol=0, atol=0 if is_exact else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_row_hurts_no_other(backend: str) -> None:
    for name in ("decode long beside short", "mixed"):
        case = CASES[name]
        problem = build(case)
        bad = problem.tokens[0]
        hurt = replace(
            problem,
            q=problem.q.at[bad].set(jnp.nan),
            k=problem.k.at[bad].set(jnp.nan),
            v=problem.v.at[bad].set(jnp.nan),
        )
        others = np.setdiff1d(np.arange(case.num_tokens), bad)
        got, plain = run(backend, case, hurt), run(backend, case, problem)
        assert np.isnan(got[bad]).all()
        np.testing.assert_array_equal(got[others], plain[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_is_written_to_its_slots_and_nowhere_else(backend: str) -> None:
    case = CASES["mixed"]
    problem = build(case)
    before = np.asarray(problem.layer_kv.k)
    _, after = jitted(backend, None)(
        problem.q, problem.k, problem.v, problem.layer_kv, jax.device_put(problem.step)
    )
    expected = before.reshape(-1, *before.shape[2:]).copy()
    live = problem.step.slots < len(expected)
    expected[problem.step.slots[live]] = np.asarray(problem.k)[live]
    np.testing.assert_array_equal(np.asarray(after.k).reshape(expected.shape), expected)


@pytest.mark.parametrize("name", ["decode long beside short", "prefill long"])
def test_write_and_attention_happen_in_place(name: str) -> None:
    """With the layer donated, both pools are aliased and nothing pool-sized is allocated."""
    case = replace(CASES[name], spare_width=100)
    problem = build(case)
    pool = jax.ShapeDtypeStruct((2**16, *problem.layer_kv.k.shape[1:]), jnp.float32)
    attend = partial(as_backend("xla").attention, spec=AttentionSpec(scale=1.0))
    compiled = (
        jax.jit(attend, donate_argnums=3)
        .lower(problem.q, problem.k, problem.v, LayerKV(k=pool, v=pool), problem.step)
        .compile()
    )
    memory = compiled.memory_analysis()
    pool_bytes = 2 * pool.size * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.02 * pool_bytes


@pytest.mark.slow
def test_the_reference_is_differentiable_in_q_k_v() -> None:
    problem = build(CASES["mixed"])
    attend = jitted("reference", None)

    @jax.jit
    def loss(inputs: tuple[jax.Array, ...]) -> jax.Array:
        return attend(*inputs, problem.layer_kv, problem.step)[0].sum()

    inputs = (problem.q, problem.k, problem.v)
    gradients = jax.jit(jax.grad(loss))(inputs)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)
    for place, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(place), gradient.shape)
        ahead, behind = (
            loss((*inputs[:place], inputs[place] + step * direction, *inputs[place + 1 :]))
            for step in (1e-2, -1e-2)
        )
        slope = float(ahead - behind) / 2e-2
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["paged", "flash", ""])
def test_an_unavailable_backend_says_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match="xla"):
        as_backend(name)
