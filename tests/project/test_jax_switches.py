"""JAX's own switches: under each, what the project computes is what it computes without.

The whole table, every part under every switch, is `python -m benchmarks.checks.switches`.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest

from benchmarks.checks import switches
from benchmarks.checks.switches import SWITCHES, Part, outcome, sharded
from jaxpage import native

ATTENTION = "native" if native.is_built() else "xla"
ENGINES = ("x64", "explicit mesh", "transfer guard", "debug infs", "disable jit")
"""The switches that an engine has something against; under others it only compiles again."""
ROUNDS_ANEW = ("explicit mesh", "disable jit")
"""Another program of a function that the caller compiles, or none; engines compile their own."""
PARTS = {
    "x64": (
        "block moves", "init_cache", "init_params", "inputs", "merge", "kernel write",
        "forward xla shared prefix", "jit sample penalised", "prompt logprobs", "kernel prefill",
    ),
    "transfer guard": ("block moves", "init_cache", "init_params", "inputs"),
    "debug infs": ("kernel decode with lse", "merge"),
    "debug nans": ("forward reference decode",),
    "disable jit": ("forward xla decode",),
    "explicit mesh": ("jit sample drawn", "kernel decode"),
}  # fmt: skip

pytestmark = pytest.mark.slow


@cache
def all_parts() -> dict[str, Part]:
    return switches.parts()


@pytest.mark.parametrize("switch", ENGINES)
def test_an_engine_built_and_run_under_a_switch_gives_the_same_bits(switch: str) -> None:
    name = f"engine {ATTENTION}"
    assert outcome(name, all_parts()[name], SWITCHES[switch]) == "same"


@pytest.mark.parametrize(
    ("switch", "part"), [(switch, part) for switch, names in PARTS.items() for part in names]
)
def test_a_public_function_under_a_switch(switch: str, part: str) -> None:
    allowed = ("same", "close") if switch in ROUNDS_ANEW else ("same",)
    assert outcome(part, all_parts()[part], SWITCHES[switch]) in allowed


@pytest.mark.parametrize(
    ("varying", "part"),
    [
        ("first", "forward xla prefill"),
        ("all", "forward xla shared prefix"),
        ("first", "jit sample drawn"),
        ("all", "jit sample edited"),
    ],
)
def test_shard_map_takes_it_with_its_checks(part: str, varying: str) -> None:
    assert sharded(part, all_parts()[part], varying=varying) == "close"


def test_the_comparison_can_fail() -> None:
    asked = []

    def run() -> jax.Array:
        asked.append(1)
        return jnp.full(3, len(asked), jnp.int32)

    assert outcome("a part that differs", Part(run), SWITCHES["x64"]) == "DIFFERENT"
    same = Part(lambda: jnp.zeros(3, jnp.int32) if asked else [][0])
    assert outcome("a part that is fine", same, SWITCHES["x64"]) == "same"
    asked.clear()
    assert outcome("a part that is fine", same, SWITCHES["x64"]).startswith("FAILED: IndexError")


@pytest.mark.skipif(not native.is_built(), reason="native kernels are not built")
@pytest.mark.parametrize("part", ["native attention", "native matmul"])
def test_a_native_kernel_maps_over_an_axis(part: str) -> None:
    run, args = all_parts()[part]
    both = jax.vmap(run)(*jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), args))
    once = run(*args)
    for leaf, wanted in zip(jax.tree.leaves(both), jax.tree.leaves(once), strict=True):
        assert (leaf == wanted[None]).all()
