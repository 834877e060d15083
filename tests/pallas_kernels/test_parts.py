"""What holds across kernels: merging, sharding, order, refusals, lowering for a card."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from pallas_kernels._compat import lowering_for
from pallas_kernels.config import Target, choose
from tests.pallas_kernels.cases import draw, run
from tests.pallas_kernels.settings import SETTINGS, SMALL, Setting


def attention(setting: Setting, interpret: bool | None = True) -> Callable[..., Any]:
    name = {
        "decode": "paged_decode_attention",
        "prefill": "paged_prefill_attention",
        "shared_prefix": "shared_prefix_decode_attention",
    }[setting.kind]
    return partial(
        getattr(pallas_kernels, name),
        scale=setting.scale,
        sliding_window=setting.window,
        soft_cap=setting.soft_cap,
        interpret=interpret,
    )


def test_parts_merge_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 2, 12)) * 9, rng.standard_normal((12, 4))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    whole = weights @ values / weights.sum(-1, keepdims=True)
    cuts = [(0, 5), (5, 5), (5, 6), (6, 12)]  # one of them empty
    outs, lses = [], []
    for start, end in cuts:
        part = np.exp(scores[..., start:end])
        total = part.sum(-1, keepdims=True)
        outs.append(jnp.asarray(part @ values[start:end] / np.maximum(total, 1e-30), jnp.float32))
        with np.errstate(divide="ignore"):
            lses.append(jnp.asarray(np.log(total[..., 0]), jnp.float32))
    out, lse = jax.jit(pallas_kernels.merge_partials)(outs, lses)
    np.testing.assert_allclose(out, whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=0, atol=2e-6)


def test_nothing_merged_with_nothing_is_zero() -> None:
    nothing = jnp.full((2,), -jnp.inf)
    out, lse = pallas_kernels.merge_partials([jnp.ones((2, 4))] * 2, [nothing] * 2)
    assert not out.any()
    assert (lse == -jnp.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode group 8 f16", "prefill window", "prefix window"])
def test_sharded_over_kv_heads(name: str) -> None:
    """Each device holds its KV heads and their query heads; there is nothing to communicate."""
    setting = SETTINGS[name]
    call = draw(setting, 3)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    heads = PartitionSpec(None, "model")
    pool = PartitionSpec(None, None, "model")
    rest = [PartitionSpec()] * (len(call.arguments) - 3)
    tuning = {"tunings": (SMALL, SMALL)} if setting.kind == "shared_prefix" else {"tuning": SMALL}
    sharded = jax.shard_map(
        partial(attention(setting), **tuning),
        mesh=mesh,
        in_specs=(heads, pool, pool, *rest),
        out_specs=heads,
        check_vma=False,
    )
    got = jax.jit(sharded)(*call.arguments)
    assert len(got.sharding.device_set) == 2
    want, _ = run("interpret", setting, call)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["decode group 8 f16", "prefill window", "prefix window"])
def test_compiled_kernels_say_over_which_axes_they_vary(name: str) -> None:
    """shard_map's own check takes them for a card; interpret mode needs it switched off."""
    setting = SETTINGS[name]
    call = draw(setting, 3)
    heads, pool = PartitionSpec(None, "model"), PartitionSpec(None, None, "model")
    rest = [PartitionSpec()] * (len(call.arguments) - 3)
    with lowering_for(Target(), "NVIDIA A100"):
        device = jax.sharding.get_abstract_mesh().abstract_device
        auto = (AxisType.Auto,)
        sharded = jax.shard_map(
            attention(setting, interpret=None),
            mesh=AbstractMesh((2,), ("model",), axis_types=auto, abstract_device=device),
            in_specs=(heads, pool, pool, *rest),
            out_specs=heads,
        )
        traced = jax.jit(sharded).trace(*call.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text


def test_a_tile_is_the_most_particular_row_of_the_table() -> None:
    def shape(arch: str, **changes: Any) -> tuple[int, int, int]:
        numbers = {"dtype": "bfloat16", "head_dim": 128, "group": 4, "kv_dtype": None} | changes
        tuning = choose("prefill", target=Target(arch), **numbers)
        return tuning.block_k, tuning.query_rows, tuning.num_warps

    assert shape("sm_80") == (64, 128, 8)
    assert shape("sm_86") == (32, 64, 8)  # a row of its own
    assert shape("sm_90") == shape("sm_90", head_dim=64) == (64, 64, 4)
    for kv_dtype in ("int8", "float8_e4m3fn"):  # 128 rows would spill
        assert shape("sm_80", kv_dtype=kv_dtype) == (32, 64, 4)
        assert shape("sm_86", kv_dtype=kv_dtype) == (32, 64, 4)
    assert shape("sm_80", kv_dtype="int8", head_dim=256) == (32, 64, 8)
    assert shape("sm_80", head_dim=64) == (32, 64, 4)
    assert shape("sm_80", dtype="float32", kv_dtype="int8") == (16, 16, 4)
    assert shape("sm_120") == shape("sm_80")  # unknown: as Ampere


@pytest.mark.slow
def test_a_broken_row_hurts_no_other() -> None:
    for name in ("decode group 8 f16", "prefill 7B", "prefix window"):
        setting = SETTINGS[name]
        call = draw(setting, 1)
        q, *rest = call.arguments
        last = q.shape[0] - 1 if setting.kind != "prefill" else 0
        got = attention(setting)(q.at[last].set(jnp.nan), *rest)
        others = np.setdiff1d(np.arange(q.shape[0]), [last])
        want = attention(setting)(q, *rest)
        assert bool(jnp.isnan(got[last]).all()) == bool(call.expected[last].any())
        np.testing.assert_array_equal(got[others], want[others])


@pytest.mark.slow
def test_a_cut_into_parts_changes_nothing_but_the_last_bits() -> None:
    setting = SETTINGS["decode one row"]
    call = draw(setting, 2)
    whole = attention(setting)(*call.arguments)
    cut = attention(setting)(*call.arguments, tuning=SMALL)
    np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", SETTINGS)
def test_lowers_for_a_card_that_is_not_there(name: str) -> None:
    """By itself: Triton in a program for CUDA, and nothing that is interpreted."""
    setting = SETTINGS[name]
    call = draw(setting, 0)
    with lowering_for(Target(), "NVIDIA A100"):
        traced = jax.jit(attention(setting, interpret=None)).trace(*call.arguments, **call.scales)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    assert "stablehlo.while" not in text


@pytest.mark.slow
def test_a_call_by_itself_is_interpreted_here() -> None:
    setting = SETTINGS["decode cap"]
    call = draw(setting, 0)
    got = attention(setting, interpret=None)(*call.arguments)
    np.testing.assert_array_equal(got, attention(setting, interpret=True)(*call.arguments))


def replaced(call: tuple[Any, ...], **changes: Any) -> list[Any]:
    names = ("q", "k", "v", "tables", "lens")
    return [changes.get(name, value) for name, value in zip(names, call, strict=True)]


def test_what_does_not_fit_is_refused() -> None:
    setting = SETTINGS["decode cap"]
    call = draw(setting, 0).arguments
    q, k, _, tables, lens = call
    decode = attention(setting)
    half = jnp.zeros((*k.shape[:2], 1, 64), jnp.int8)
    for changes, complaint in (
        ({"q": q[0]}, "wanted q"),
        ({"q": q[..., :32]}, "the same size"),
        ({"q": q[:, :7]}, "a multiple"),
        ({"q": q.astype(jnp.float16).view(jnp.int16)}, "queries of int16"),
        ({"k": half, "v": half}, "got scales None"),
        ({"tables": tables.astype(jnp.int16)}, "int32"),
        ({"lens": lens.astype(jnp.uint32)}, "int32"),
    ):
        with pytest.raises(ValueError, match=complaint):
            decode(*replaced(call, **changes))
    with pytest.raises(ValueError, match="sliding_window=0"):
        pallas_kernels.paged_decode_attention(*call, scale=1.0, sliding_window=0)
    with pytest.raises(ValueError, match="got scales"):
        decode(*call, k_scales=jnp.ones(k.shape[:3]))


@pytest.mark.slow
def test_imports_nothing_but_jax_and_loads_lazily() -> None:
    """The package works where jax is all there is; test_layering.py reads its imports."""
    code = (
        "import sys, pallas_kernels; assert 'jax' not in sys.modules; "
        "pallas_kernels.paged_decode_attention; "
        "assert not {'jaxpage', 'flax', 'triton', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert importlib.metadata.version("jax")


@pytest.mark.slow
def test_the_example_in_the_docstring_runs() -> None:
    lines = str(pallas_kernels.__doc__).splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    assert names["out"].shape == (2, 32, 128)
    assert bool(jnp.isfinite(names["out"].astype(jnp.float32)).all())
