"""Random ragged calls of the attention kernels over a poisoned pool, and their float64 answers.

Every slot that no row may read holds NaN (8-bit pools: the largest numbers and NaN scales), table
entries beyond a row's live blocks are rubbish, and a draw's numbers change while its shapes stay,
so that one program serves all draws of a setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import reference
from tests.pallas_kernels.settings import Setting

TOLERANCES = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
"""Largest error of a token's output over its largest expected entry."""
LSE_TOLERANCE = 2e-5
"""Absolute, whatever the dtype: scores are float32 products of numbers that are exact."""


@dataclass(frozen=True)
class Draw:
    """One call: the arguments, and what it must give."""

    arguments: tuple[Any, ...]
    scales: dict[str, Any]
    expected: np.ndarray  # [T, N, H] float64
    expected_lse: np.ndarray  # [T, N] float64


@dataclass(frozen=True)
class Wrong:
    """How an oracle may be wrong, to prove that a comparison would notice."""

    swaps_k_and_v: bool = False
    last_token_off: int = 0
    """Moves the causal mask."""
    heads_shifted: int = 0


def draw(setting: Setting, seed: int, wrong: Wrong = Wrong()) -> Draw:
    rng = np.random.default_rng((seed, setting.head_dim, setting.group))
    contexts, fed, groups, prefixes = _lengths(setting, rng)
    size, width, rows = setting.block_size, setting.table_width, setting.num_rows
    starts = np.concatenate([[0], np.cumsum(fed)])
    num_tokens = rows if setting.kind != "prefill" else setting.num_tokens
    num_blocks = rows * width + 2
    tables = 1 + rng.permutation(num_blocks - 1)[: rows * width].reshape(rows, width)
    for members, prefix in zip(groups, prefixes, strict=True):
        tables[members, : prefix // size] = tables[members[0], : prefix // size]
    pools, scales, exact = _pools(setting, rng, num_blocks)
    q = _rounded(rng.standard_normal((num_tokens, setting.num_heads, setting.head_dim)), setting)
    live = np.zeros((num_blocks * size,), bool)
    expected = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for row, context in enumerate(contexts):
        position = np.arange(context)
        slots = tables[row, position // size] * size + position % size
        oldest = 0
        if setting.window is not None:
            oldest = max(0, context - max(fed[row], 1) + 1 - setting.window)
        live[slots[oldest:]] = True
        tables[row, -(-context // size) :] = rng.choice([0, 1, 10**6], width)[-(-context // size) :]
        for index in range(fed[row]):
            token = starts[row] + index if setting.kind == "prefill" else row
            end = context - fed[row] + index + 1
            k, v = (pool.reshape(-1, *pool.shape[2:])[slots] for pool in exact)
            expected[token], lse[token] = _attend(setting, q[token], k, v, end=end, wrong=wrong)
    k, v = (_poisoned(pool, live) for pool in pools)
    arguments = [_array(q, setting.dtype), k, v, _int(tables), _int(contexts)]
    if setting.kind == "prefill":
        arguments.append(_int(starts))
    if setting.kind == "shared_prefix":
        arguments += [_members(groups, rows), _int([*prefixes, 0, 0, 0][:3])]
    named = {
        name: jnp.where(live.reshape(-1, size)[:, :, None], jnp.asarray(array), jnp.nan)
        for name, array in scales.items()
    }
    return Draw(tuple(arguments), named, expected, lse)


def run(backend: str, setting: Setting, call: Draw) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of "reference", "interpret" or "gpu", as float64."""
    out, lse = _jitted(backend, setting)(*call.arguments, **call.scales)
    return np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse, np.float64)


def worst_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of any token over its own largest entry; infinity for NaN."""
    largest = np.abs(expected).max((1, 2))
    error = np.abs(got - expected).max((1, 2))
    wrong_zero = np.where(error == 0, 0, np.inf)
    relative = np.where(largest > 0, error / np.where(largest > 0, largest, 1), wrong_zero)
    return float(np.nan_to_num(relative, nan=np.inf, posinf=np.inf).max())


def worst_lse_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute error; infinity for NaN and where only one of the two is -inf."""
    with np.errstate(invalid="ignore"):
        error = np.where(got == expected, 0, np.abs(got - expected))
    return float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max())


@cache
def _jitted(backend: str, setting: Setting) -> Any:
    name = {
        "decode": "paged_decode_attention",
        "prefill": "paged_prefill_attention",
        "shared_prefix": "shared_prefix_decode_attention",
    }[setting.kind]
    settings: dict[str, Any] = {
        "scale": setting.scale,
        "sliding_window": setting.window,
        "soft_cap": setting.soft_cap,
        "return_lse": True,
    }
    if backend == "reference":
        function = getattr(reference, name)
    else:
        function = getattr(pallas_kernels, name)
        settings["interpret"] = backend == "interpret"
        if setting.kind == "shared_prefix":
            settings["tunings"] = setting.tuning and (setting.tuning, setting.tuning)
        else:
            settings["tuning"] = setting.tuning

    def call(*arguments: Any, **scales: Any) -> Any:
        return function(*arguments, **settings, **scales)

    return jax.jit(call)


def _lengths(
    setting: Setting, rng: np.random.Generator
) -> tuple[list[int], list[int], list[list[int]], list[int]]:
    """(contexts, tokens fed, rows of each group, tokens that each group shares)."""
    size, most = setting.block_size, setting.most_tokens
    edges = [0, 1, max(size - 1, 1), size, size + 1]
    contexts = [int(rng.choice([*edges, *rng.integers(1, most, 5)])) for _ in range(6)]
    contexts = contexts[: setting.num_rows]
    contexts[rng.integers(setting.num_rows)] = most
    if setting.kind == "prefill":
        fed, left = [], setting.num_tokens - int(rng.integers(3))
        for context in contexts:
            wanted = [0, min(context, 1), context, int(rng.integers(context + 1))]
            fed.append(min(int(rng.choice(wanted)), left))
            left -= fed[-1]
        return contexts, fed, [], []
    groups: list[list[int]] = []
    prefixes = []
    if setting.kind == "shared_prefix":
        order = rng.permutation(setting.num_rows).tolist()
        cut = int(rng.integers(2, setting.num_rows + 1))
        groups = [order[:cut], *([order[cut:]] if setting.num_rows - cut >= 2 else [])]
        for members in groups:
            blocks = int(rng.integers(1, most // size))
            prefixes.append(blocks * size)
            for row in members:
                contexts[row] = int(rng.integers(blocks * size + 1, most + 1))
    return contexts, [min(context, 1) for context in contexts], groups, prefixes


def _members(groups: list[list[int]], num_rows: int) -> jax.Array:
    """Three groups' rows [3, B]; at least one of them empty."""
    members = np.full((3, num_rows), num_rows)
    for index, own in enumerate(groups):
        members[index, : len(own)] = own
    return _int(members)


def _pools(
    setting: Setting, rng: np.random.Generator, num_blocks: int
) -> tuple[list[Any], dict[str, np.ndarray], list[np.ndarray]]:
    """(pools as they are stored, their scales, their exact numbers)."""
    shape = (num_blocks, setting.block_size, setting.num_kv_heads, setting.head_dim)
    pools = [_rounded(rng.standard_normal(shape), setting) for _ in range(2)]
    if setting.kv_dtype is None:
        return [_array(pool, setting.dtype) for pool in pools], {}, pools
    pairs = [
        pallas_kernels.quantize(jnp.asarray(pool, jnp.float32), setting.kv_dtype) for pool in pools
    ]
    exact = [
        np.asarray(values.astype(jnp.float32), np.float64) * np.asarray(scale)[..., None]
        for values, scale in pairs
    ]
    scales = {f"{name}_scales": np.asarray(pair[1]) for name, pair in zip("kv", pairs, strict=True)}
    return [values for values, _ in pairs], scales, exact


def _attend(
    setting: Setting, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, end: int, wrong: Wrong
) -> tuple[np.ndarray, np.ndarray]:
    """(out [N, H], lse [N]) of one query that sees tokens .. end - 1 of its row."""
    if wrong.swaps_k_and_v:
        k, v = v, k
    first = 0 if setting.window is None else max(0, end - setting.window)
    end = min(end + wrong.last_token_off, len(k))
    if end <= first:
        return np.zeros(q.shape), np.full(q.shape[:1], -np.inf)
    k, v = (np.repeat(array[first:end], setting.group, axis=1) for array in (k, v))
    scores = np.einsum("nh,snh->ns", q, k) * setting.scale
    if setting.soft_cap is not None:
        scores = np.tanh(scores / setting.soft_cap) * setting.soft_cap
    top = scores.max(1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(1)
    out = np.einsum("ns,snh->nh", weights, v) / total[:, None]
    return np.roll(out, wrong.heads_shifted, axis=0), top[:, 0] + np.log(total)


def _poisoned(pool: jax.Array, live: np.ndarray) -> jax.Array:
    mask = live.reshape(*pool.shape[:2], 1, 1)
    poison = jnp.nan if jnp.issubdtype(pool.dtype, jnp.floating) else 127
    return jnp.where(mask, pool, jnp.asarray(poison, pool.dtype))


def _rounded(array: np.ndarray, setting: Setting) -> np.ndarray:
    """What the dtype keeps of it, as float64."""
    return np.asarray(_array(array, setting.dtype).astype(jnp.float32), np.float64)


def _array(array: np.ndarray, dtype: str) -> jax.Array:
    return jnp.asarray(array, jnp.float32).astype(dtype)


def _int(array: Any) -> jax.Array:
    return jnp.asarray(np.asarray(array), jnp.int32)
