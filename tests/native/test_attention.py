"""Native attention keeps the contract of all backends, and is the same to the bit however cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import native
from jaxpage.backends import as_backend
from jaxpage.config import AttentionSpec
from jaxpage.device.types import LayerKV
from jaxpage.errors import ConfigError
from tests.backends import test_attention as contract
from tests.backends.attention_cases import TOLERANCES, Case, build, run, worst_error

NOWHERE = jnp.int32(2**30)
"""Slots from here on are dropped."""

MORE = {
    "head 64, group 3": Case(rows=((700, 1), (33, 1)), group=3, head_dim=64, block_size=16),
    "head 80, group 4": Case(rows=((150, 150), (70, 1)), group=4, head_dim=80, block_size=7),
    "head 128, group 9": Case(rows=((130, 40), (65, 65)), group=9, head_dim=128, block_size=16),
    "head 5, group 1": Case(rows=((257, 1), (256, 1), (64, 1)), head_dim=5, block_size=1),
    "group beyond a tile": Case(rows=((70, 3), (9, 9)), num_kv_heads=1, group=70, head_dim=24),
    "long window": Case(rows=((900, 1), (600, 90)), window=300, block_size=16, group=2),
    "bfloat16 pool": Case(rows=((600, 1), (300, 80)), dtype="bfloat16", head_dim=40, group=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", contract.CASES)
def test_equals_dense_attention(name: str) -> None:
    contract.test_equals_dense_attention("native", name)


@pytest.mark.parametrize("name", MORE)
def test_equals_dense_attention_at_its_own_edges(name: str) -> None:
    case = MORE[name]
    problem = build(case)
    assert worst_error(run("native", case, problem), problem) < TOLERANCES[case.dtype]


def test_padding_and_empty_rows_give_exactly_zero() -> None:
    contract.test_padding_and_empty_rows_give_exactly_zero("native")


def test_a_broken_row_hurts_no_other() -> None:
    contract.test_a_broken_row_hurts_no_other("native")


def test_the_step_is_written_to_its_slots_and_nowhere_else() -> None:
    contract.test_the_step_is_written_to_its_slots_and_nowhere_else("native")


@pytest.mark.parametrize("name", ["decode long beside short", "mixed", "prefill long"])
def test_order_and_padding_change_no_bit(name: str) -> None:
    case = contract.CASES[name]
    order = tuple(np.random.default_rng(3).permutation(len(case.rows)).tolist())
    other = replace(case, order=order, spare_rows=4, spare_width=9)
    first, second = build(case), build(other)
    a, b = run("native", case, first), run("native", other, second)
    for row in range(len(case.rows)):
        np.testing.assert_array_equal(b[second.tokens[row]], a[first.tokens[row]])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_cuts_change_no_bit(window: int | None) -> None:
    """The last token of a long row: fed alone (its keys split over threads), among many other
    rows, and as the end of a prefill of 70, 21 and 2."""
    rng, context, size = np.random.default_rng(0), 1100, 16
    blocks = -(-context // size)
    pools = rng.standard_normal((2, blocks + 1, size, 2, 64), dtype=np.float32)
    q = rng.standard_normal((70, 6, 64), dtype=np.float32)
    table = rng.permutation(np.arange(1, blocks + 1)).astype(np.int32)

    def last(fed: int, others: int = 0) -> np.ndarray:
        rows = 1 + others
        out, *_ = native.paged_attention(
            jnp.concatenate([jnp.asarray(q[-fed:]), jnp.ones((others, 6, 64))]),
            *(jnp.zeros((fed + others, 2, 64)),) * 2,
            *(jnp.asarray(pool) for pool in pools),
            slots=NOWHERE + jnp.arange(fed + others),
            block_tables=jnp.asarray(np.tile(table, (rows, 1))),
            context_lens=jnp.full(rows, context, jnp.int32),
            query_starts=jnp.asarray([0, *range(fed, fed + rows)], jnp.int32),
            scale=0.125,
            sliding_window=window,
        )
        return np.asarray(out)[fed - 1]

    alone = last(1)
    assert np.abs(alone).max() > 0.01
    for fed, others in ((1, 30), (70, 0), (21, 0), (2, 3)):
        np.testing.assert_array_equal(last(fed, others), alone)


@pytest.mark.parametrize("num_others", [0, 2, 30])
def test_sharing_blocks_changes_no_bit(num_others: int) -> None:
    """Rows that begin with the same blocks, in two groups one inside the other, beside rows that
    share nothing: each equals itself with a table of its own, whose blocks are copies."""
    rng, size, width = np.random.default_rng(1), 16, 42
    shared = [(20, 5), (20, 9), (20, 20), (12, 30), (12, 12), (0, 33)]  # shared and own blocks
    pools = rng.standard_normal((2, 600, size, 2, 64), dtype=np.float32)
    own = iter(range(30, 600))
    tables = np.zeros((len(shared) + num_others, width), np.int32)
    apart = tables.copy()
    for row, (common, more) in enumerate([*shared, *[(0, 4)] * num_others]):
        tables[row, : common + more] = [*range(1, common + 1), *(next(own) for _ in range(more))]
        apart[row] = tables[row]
        for index in range(common):
            apart[row, index] = block = next(own)
            pools[:, block] = pools[:, index + 1]
    lens = (tables > 0).sum(1) * size - np.arange(len(tables)) % 7
    q = rng.standard_normal((len(tables), 6, 64), dtype=np.float32)

    def attend(tables: np.ndarray, shares_prefixes: bool = True) -> np.ndarray:
        out, *_ = native.paged_attention(
            jnp.asarray(q),
            *(jnp.zeros((len(tables), 2, 64)),) * 2,
            *(jnp.asarray(pool) for pool in pools),
            slots=NOWHERE + jnp.arange(len(tables)),
            block_tables=jnp.asarray(tables),
            context_lens=jnp.asarray(lens, jnp.int32),
            query_starts=jnp.arange(len(tables) + 1, dtype=jnp.int32),
            scale=0.125,
            shares_prefixes=shares_prefixes,
        )
        return np.asarray(out)

    got = attend(tables)
    np.testing.assert_array_equal(got, attend(tables, shares_prefixes=False))
    np.testing.assert_array_equal(got, attend(apart))
    pools[:, 1] += 1  # a block that the first rows share, and not their copies
    assert (np.abs(attend(tables)[:5] - got[:5]).max((1, 2)) > 0).all()


def test_pools_stay_in_place() -> None:
    """With the layer donated both pools are aliased, and no copy surrounds the custom call."""
    problem = build(replace(contract.CASES["decode long beside short"], spare_width=100))
    pool = jax.ShapeDtypeStruct((2**16, *problem.layer_kv.k.shape[1:]), jnp.float32)
    attend = partial(as_backend("native").attention, spec=AttentionSpec(scale=1.0))
    compiled = (
        jax.jit(attend, donate_argnums=3)
        .lower(problem.q, problem.k, problem.v, LayerKV(k=pool, v=pool), problem.step)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool.size * 4
    assert memory.temp_size_in_bytes < 0.02 * pool.size * 8


GOOD = {
    "q": jnp.zeros((2, 6, 8)),
    "k": jnp.zeros((2, 2, 8)),
    "v": jnp.zeros((2, 2, 8)),
    "slots": jnp.zeros(2, jnp.int32),
    "k_pool": jnp.zeros((3, 4, 2, 8)),
    "v_pool": jnp.zeros((3, 4, 2, 8)),
    "block_tables": jnp.zeros((2, 2), jnp.int32),
    "context_lens": jnp.zeros(2, jnp.int32),
    "query_starts": jnp.zeros(3, jnp.int32),
}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"q": jnp.zeros((2, 5, 8))}, "multiple"),
        ({"q": jnp.zeros((2, 6, 4))}, "multiple"),
        ({"v_pool": jnp.zeros((3, 4, 2, 4))}, "the same"),
        ({"k_pool": jnp.zeros((3, 4, 2, 8), jnp.float16)}, "cast"),
        ({"k": jnp.zeros((2, 1, 8))}, "wanted"),
        ({"slots": jnp.zeros(3, jnp.int32)}, r"\[T\]"),
        ({"context_lens": jnp.zeros(3, jnp.int32)}, r"\[B\]"),
        ({"query_starts": jnp.zeros(3, jnp.float32)}, "int32"),
    ],
)
def test_wrong_operands_are_refused(changed: dict[str, jax.Array], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        native.paged_attention(**{**GOOD, **changed}, scale=1.0)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (2, 0, 8)},
        {"q": (0, 6, 8), "k": (0, 2, 8), "v": (0, 2, 8), "slots": (0,)},
        {name: (*GOOD[name].shape[:-1], 0) for name in ("q", "k", "v", "k_pool", "v_pool")},
        {"block_tables": (2, 0)},
        {"block_tables": (0, 2), "context_lens": (0,), "query_starts": (1,)},
    ],
    ids=["query heads", "tokens", "entries", "blocks of a row", "rows"],
)
def test_attention_of_nothing_is_empty_or_zero(shapes: dict[str, tuple[int, ...]]) -> None:
    empty = {name: jnp.zeros(shape, GOOD[name].dtype) for name, shape in shapes.items()}
    out, *_ = native.paged_attention(**{**GOOD, **empty}, scale=1.0)
    np.testing.assert_array_equal(out, np.zeros(shapes.get("q", GOOD["q"].shape)))


@pytest.mark.parametrize("axis", range(3))
def test_no_pool_without_blocks_slots_or_heads(axis: int) -> None:
    shape = tuple(0 if i == axis else n for i, n in enumerate(GOOD["k_pool"].shape))
    kv = jnp.zeros((2, *shape[2:]))
    changed = {"k": kv, "v": kv, "k_pool": jnp.zeros(shape), "v_pool": jnp.zeros(shape)}
    with pytest.raises(ConfigError, match="at least 1"):
        native.paged_attention(**{**GOOD, **changed}, scale=1.0)


def test_no_window_below_one() -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        native.paged_attention(**GOOD, scale=1.0, sliding_window=0)
