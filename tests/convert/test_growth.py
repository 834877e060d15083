"""A conversion's memory: less than one and a half shards and the largest tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.formats import random_model, variant, write_hf
from tests.helpers.formats.variants import BASE

ROOT = Path(__file__).parents[2]
SHARDS = 3
LARGE = BASE | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "vocab_size": 8192,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_memory_stays_within_the_promise(to: str, tmp_path: Path) -> None:
    write_hf(variant("gqa"), tmp_path / "small")
    model = random_model(LARGE)
    write_hf(model, tmp_path / "large", shards=SHARDS)
    shards = [path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")]
    tensors = [value.nbytes for value in model.weights.values()]
    promise = 1.5 * max(shards) + max(tensors)
    assert len(shards) == SHARDS
    assert promise < sum(tensors), "reading everything at once would pass"
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.growth", "small", "large", "out", "--to", to],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(tensors) / 2 < int(done.stdout) < promise
