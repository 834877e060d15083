"""The script for the day there is a card runs end to end without one, so that it can't rot."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu import peers

HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The quick version's folder and record."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu", "--quick"])
        patch.setattr("benchmarks.common.report.OUT", folder)
        assert gpu_check.main() == 0
    return folder, json.loads((folder / "gpu_quick.json").read_text())


@pytest.mark.slow
def test_all_kernels_are_verified_over_all_pools(ran: tuple[Path, dict[str, Any]]) -> None:
    rows = ran[1]["verified"]
    assert all(row["ok"] for row in rows)
    cases = {row["case"] for row in rows}
    for kind in ("decode", "prefill", "shared prefix", "write"):
        for pool in ("bfloat16", "bfloat16 over int8", "bfloat16 over float8_e4m3fn"):
            assert f"{kind} 4/2 d16 {pool}" in cases
    (step,) = (row for row in rows if row["case"] == "whole step")
    assert step["error"] < 1e-5  # NaN, which is not, where all logits are 0


@pytest.mark.slow
def test_everything_is_timed_with_its_peers_and_drawn(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, record = ran
    (decode,), (prefill,), step = record["decode"], record["prefill"], record["step"]
    for row in (decode, prefill, step):
        assert row["us"] > 0
        assert row["share"] > 0
    assert decode["peers"]["cuDNN paged"]["missing"]  # says what: there is no GPU here
    for row in (decode, prefill):
        dense = row["peers"]["XLA dense"]
        assert dense["share"] / row["share"] == pytest.approx(row["us"] / dense["us"])
    picture = (folder / "gpu_quick.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.count(". XLA dense") == 2


@pytest.mark.slow
def test_transformers_runs_the_same_weights(ran: tuple[Path, dict[str, Any]]) -> None:
    peer = ran[1]["step"]["peers"]["Transformers"]
    if HAS_TRANSFORMERS:
        assert peer["us"] > 0
        assert 0 < peer["difference"] < 1e-5
    else:
        assert "not installed" in peer["missing"]


def test_cudnn_is_asked_for_paged_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without a card can tell: the shapes pass and the call is lowered."""
    monkeypatch.setattr(f"{peers.CUDNN}.check_cudnn_version", lambda: 91000)
    q, pool = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((6, 16, 4, 64), jnp.bfloat16)
    tables = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    lens = jnp.full((2,), 48, jnp.int32)
    traced = jax.jit(peers.cudnn_paged).trace(q, pool, pool, tables, lens)
    assert traced.out_info.shape == q.shape
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
    assert '"is_paged_attention": true' in text.replace("\\22", '"')


@pytest.mark.slow
def test_dense_attention_equals_the_kernels() -> None:
    q, k, v = (jax.random.normal(key, (2, 8, 64)) for key in jax.random.split(jax.random.key(0), 3))
    keys, values = (x.reshape(2, 2, 4, 64) for x in (k, v))
    got = peers.dense_decode(q, keys, values)
    scores = jnp.einsum("bkgh,bskh->bkgs", q.reshape(2, 4, 2, 64), keys) / 8
    want = jnp.einsum("bkgs,bskh->bkgh", jax.nn.softmax(scores), values)
    assert bool(jnp.allclose(got.reshape(want.shape), want, atol=1e-5))


@pytest.mark.slow
def test_a_wrong_kernel_ends_with_status_1_untimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [{"case": "decode", "error": 1.0, "tolerance": 1e-2, "ok": False}]
    monkeypatch.setattr(sys, "argv", ["gpu", "--quick"])
    monkeypatch.setattr("benchmarks.common.report.OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "verify_kernels", lambda sizes: wrong)
    monkeypatch.setattr(gpu_check, "_verify_step", lambda sizes: [])
    assert gpu_check.main() == 1
    assert "WRONG" in capsys.readouterr().out
    assert "decode" not in json.loads((tmp_path / "gpu_quick.json").read_text())
