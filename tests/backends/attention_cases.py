"""Steps over a poisoned pool, and what attention over them must give, in float64 NumPy.

Every slot that no row may read holds NaN, table entries beyond a row's live blocks are rubbish,
and blocks that have left a sliding window have given way to the null block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.backends import as_backend
from jaxpage.config import AttentionSpec
from jaxpage.device.attention.store import store_then_attend
from jaxpage.device.attention.xla import decode_batch
from jaxpage.device.types import LayerKV, StepInput

TOLERANCES = {"float32": 4e-6, "bfloat16": 1.2e-2, "float16": 1.5e-3}
"""Largest error of a token's output over its largest expected entry, or over 1."""
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """`rows` are (context_len, tokens fed by this step); all of one token: a decode step."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 8
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    spare_rows: int = 0
    spare_tokens: int = 0
    spare_width: int = 2
    order: tuple[int, ...] | None = None
    """Which row of `rows` stands at each place of the batch; its numbers go with it."""
    groups: tuple[tuple[tuple[int, ...], int], ...] = ()
    """(rows, tokens they share: whole blocks) of a decode step; places of the batch too."""
    num_single: int = 0
    """A mixed step: the first rows, one token each, padded to so many."""
    causal_shift: int = 0
    """Moves the oracle's mask: a wrong oracle, to prove that the comparison would notice."""

    @property
    def is_decode(self) -> bool:
        return all(fed <= 1 for _, fed in self.rows) and not self.spare_tokens

    @property
    def num_padding_decodes(self) -> int:
        """Padding rows between the decode rows of a mixed step and the others."""
        live = next((i for i, (_, fed) in enumerate(self.rows) if fed > 1), len(self.rows))
        return self.num_single - live if self.num_single else 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) + self.num_padding_decodes + self.spare_rows

    def leader(self, row: int) -> tuple[int, int]:
        """(the first row of the row's group, tokens it shares with it)."""
        return next(((rows[0], n) for rows, n in self.groups if row in rows), (row, 0))

    def oldest_kept(self, row: int) -> int:
        """The first token whose block the row still holds, whatever left its window."""
        if self.window is None or self.groups:
            return 0
        context, fed = self.rows[row]
        return max(0, context - fed + 1 - self.window)

    @property
    def num_tokens(self) -> int:
        tokens = sum(fed for _, fed in self.rows) + self.spare_tokens + self.num_padding_decodes
        if self.is_decode:
            return self.num_rows
        return tokens

    @property
    def places(self) -> tuple[int | None, ...]:
        """The row at each place; None: padding."""
        if self.num_single:
            live = self.num_single - self.num_padding_decodes
            rows = range(len(self.rows))
            return (*rows[:live], *[None] * self.num_padding_decodes, *rows[live:])
        return self.order or tuple(range(len(self.rows)))


@dataclass(frozen=True)
class Problem:
    """The case as arrays; `tokens[r]` are the places in T of the tokens of row r of the case."""

    q: Any  # [T, N, H]
    k: Any  # [T, K, H]
    v: Any  # [T, K, H]
    layer_kv: LayerKV
    step: StepInput
    expected: np.ndarray  # [T, N, H] float64
    tokens: dict[int, np.ndarray]


def build(case: Case) -> Problem:
    size, rng = case.block_size, np.random.default_rng(0)
    num_blocks = [-(-context // size) for context, _ in case.rows]
    width = max(1, *num_blocks) + case.spare_width
    num_pool_blocks = sum(num_blocks) + 3
    pool_shape = (num_pool_blocks, size, case.num_kv_heads, case.head_dim)
    pools = np.full((2, *pool_shape), np.nan)
    by_slot = pools.reshape(2, -1, *pool_shape[2:])
    step = _padding_step(case, width, first_dead_slot=num_pool_blocks * size, rng=rng)
    q = rng.standard_normal((case.num_tokens, case.num_kv_heads * case.group, case.head_dim))
    kv = rng.standard_normal((2, case.num_tokens, case.num_kv_heads, case.head_dim))
    expected, tokens, end = np.zeros(q.shape), {}, 0
    free = iter(rng.permutation(np.arange(1, num_pool_blocks)))
    for place, row in enumerate(case.places):
        if row is None:
            end += 1
            step.query_starts[place + 1 :] = end
            continue
        context, fed = case.rows[row]
        first = place if case.is_decode else end
        end = first + fed
        tokens[row] = np.arange(first, end)
        queries, history = _row_numbers(case, row)
        q[first:end], kv[:, first:end] = queries, history[:, context - fed :]
        expected[first:end] = dense_attention(case, queries, history)
        blocks = _blocks(case, row, free, step.block_tables)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)[:context]
        oldest = case.oldest_kept(row)
        by_slot[:, slots[oldest : context - fed]] = history[:, oldest : context - fed]
        blocks[: oldest // size] = 0
        step.block_tables[place, : len(blocks)] = blocks
        step.positions[first:end] = np.arange(context - fed, context)
        step.slots[first:end] = slots[context - fed :]
        step.context_lens[place] = context
        step.query_starts[place + 1 :] = end
    if case.is_decode:
        step.query_starts[:] = np.minimum(np.arange(case.num_rows + 1), len(case.rows))
    q, k, v = (_rounded(array, case.dtype) for array in (q, *kv))
    layer_kv = LayerKV(*(_rounded(pool, case.dtype) for pool in pools))
    return Problem(q, k, v, layer_kv, step, expected, tokens)


def run(name: str, case: Case, problem: Problem | None = None) -> np.ndarray:
    """The backend's output, as float64."""
    problem = problem or build(case)
    out, _ = jitted(name, case.window, case.soft_cap)(
        problem.q, problem.k, problem.v, problem.layer_kv, jax.device_put(problem.step)
    )
    return np.asarray(out.astype(jnp.float32), np.float64)


@cache
def jitted(name: str, window: int | None, soft_cap: float | None = None) -> Any:
    """A backend by name, or "batch": the form of "xla" that only other devices than CPUs take."""
    spec = AttentionSpec(scale=SCALE, window=window, soft_cap=soft_cap)
    if name != "batch":
        return jax.jit(partial(as_backend(name).attention, spec=spec))

    def attend(q: Any, layer_kv: LayerKV, step: StepInput, spec: AttentionSpec) -> Any:
        return decode_batch(q.astype(jnp.float32) * spec.scale, layer_kv, step, spec=spec)

    return jax.jit(partial(store_then_attend, attend=attend, spec=spec))


def worst_error(got: np.ndarray, problem: Problem) -> float:
    """The largest error of any token, each over its own largest entry; infinity for NaN."""
    scale = np.maximum(np.abs(problem.expected).max((1, 2)), 1)
    error = np.abs(got - problem.expected).max((1, 2)) / scale
    return float(np.nan_to_num(error, nan=np.inf).max())


def swapped(problem: Problem) -> Problem:
    """K and V exchanged everywhere."""
    pool = problem.layer_kv
    return replace(problem, k=problem.v, v=problem.k, layer_kv=LayerKV(k=pool.v, v=pool.k))


def dense_attention(case: Case, queries: np.ndarray, history: np.ndarray) -> np.ndarray:
    """[fed, N, H] of one row, a query and a head at a time."""
    keys, values = history
    context, fed = len(keys), len(queries)
    out = np.zeros(queries.shape)
    for index in range(fed):
        last = min(context - fed + index + case.causal_shift, context - 1)
        first = 0 if case.window is None else max(0, last + 1 - case.window)
        for head in range(queries.shape[1]):
            k = keys[first : last + 1, head // case.group]
            scores = k @ queries[index, head] * SCALE
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max(initial=-np.inf))
            v = values[first : last + 1, head // case.group]
            out[index, head] = weights @ v / weights.sum() if len(k) else 0
    return out


def _row_numbers(case: Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [fed, N, H] and K, V [2, context, K, H] of a row: the same in any batch."""
    context, fed = case.rows[row]
    rng = np.random.default_rng((1, row))
    queries = rng.standard_normal((fed, case.num_kv_heads * case.group, case.head_dim))
    history = rng.standard_normal((2, context, case.num_kv_heads, case.head_dim))
    leader, shared = case.leader(row)
    if leader != row:
        history[:, :shared] = _row_numbers(case, leader)[1][:, :shared]
    return tuple(
        np.asarray(_rounded(array, case.dtype).astype(jnp.float32), np.float64)
        for array in (queries, history)
    )


def _blocks(case: Case, row: int, free: Iterator[int], tables: Any) -> np.ndarray:
    """Blocks of the row's tokens: new ones, after those that it shares with its leader."""
    size = case.block_size
    blocks = np.array([next(free) for _ in range(-(-case.rows[row][0] // size))], np.int32)
    leader, shared = case.leader(row)
    if leader != row:
        blocks[: shared // size] = tables[leader, : shared // size]
    return blocks


def _rounded(array: np.ndarray, dtype: str) -> jax.Array:
    return jnp.asarray(array, jnp.float32).astype(dtype)


def _padding_step(
    case: Case, width: int, *, first_dead_slot: int, rng: np.random.Generator
) -> StepInput:
    """The case's groups and padding, with tables of rubbish: live ids, ids beyond the pool."""
    rows, tokens = case.num_rows, case.num_tokens
    group_rows = np.full((len(case.groups) + 1, rows), rows, np.int32)
    prefix_lens = np.zeros(len(case.groups) + 1, np.int32)
    for group, (members, shared) in enumerate(case.groups):
        group_rows[group, : len(members)] = members
        prefix_lens[group] = shared
    rubbish = rng.choice([0, 1, 2, 10**6], (rows, width)).astype(np.int32)
    return StepInput(
        tokens=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slots=first_dead_slot + np.arange(tokens, dtype=np.int32),
        block_tables=rubbish,
        context_lens=np.zeros(rows, np.int32),
        query_starts=np.zeros(rows + 1, np.int32),
        token_source=np.zeros(rows, np.int32),
        prompt_lens=np.zeros(rows, np.int32),
        logit_index=np.zeros(rows, np.int32),
        group_rows=group_rows if case.groups else None,
        prefix_lens=prefix_lens if case.groups else None,
        num_single=case.num_rows if case.is_decode else case.num_single,
    )
