"""PyTorch files: what is refused, and that nothing is unpickled. Round trips: tests/formats."""

from __future__ import annotations

import builtins
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxpage.errors import CheckpointError
from jaxpage.formats.torch_io import read_bin_files, read_meta_shards
from tests.helpers.formats import random_model, variant, write_meta
from tests.helpers.formats.variants import BASE

torch_only = pytest.mark.torch


@torch_only
def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**15, (3, 4), dtype=np.int16)
    value = torch.from_numpy(bits).view(torch.bfloat16)
    torch.save({"a": value, "b": value.T}, tmp_path / "x.bin")
    tensors = read_bin_files([tmp_path / "x.bin"])
    found = tensors["a"].read()
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.int16), bits)
    np.testing.assert_array_equal(tensors["b"].read().view(np.int16), bits.T)


@torch_only
def test_files_from_before_zip_archives_are_read(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "x.bin"
    torch.save({"a": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    np.testing.assert_array_equal(read_bin_files([path])["a"].read(), [0, 1, 2])


class Trap:
    """Unpickling it would leave a mark."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path(__file__).with_name("unpickled"),)


@torch_only
def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    import torch

    torch.save({"a": Trap()}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_bin_files([tmp_path / "x.bin"])
    assert not Path(__file__).with_name("unpickled").exists()


@torch_only
@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\3\4" + b"\0" * 60])
def test_damaged_files_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.bin") as error:
        read_bin_files([tmp_path / "x.bin"])
    assert "\n" not in str(error.value)


@torch_only
def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.bin")
    data = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        read_bin_files([tmp_path / "x.bin"])


@torch_only
def test_a_training_state_says_what_is_wanted(tmp_path: Path) -> None:
    import torch

    torch.save({"model": {"a": torch.zeros(1)}, "step": 3}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="state dict"):
        read_bin_files([tmp_path / "x.bin"])


@torch_only
def test_integers_only_matter_when_read(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "x.bin")
    tensor = read_bin_files([tmp_path / "x.bin"])["a"]
    with pytest.raises(CheckpointError, match=r"a of type torch\.int64"):
        tensor.read()


@torch_only
@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_shard_is_named(lost: int, tmp_path: Path) -> None:
    write_meta(variant("gqa"), tmp_path, shards=2)
    (tmp_path / f"consolidated.0{lost}.pth").unlink()
    if lost:
        shutil.copy(tmp_path / "consolidated.00.pth", tmp_path / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match=rf"no consolidated\.0{lost}\.pth"):
        read_meta_shards(tmp_path, 32)


@torch_only
def test_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    write_meta(variant("gqa"), tmp_path / "a", shards=2)
    write_meta(random_model(BASE | {"vocab_size": 100}), tmp_path / "b", shards=2)
    shutil.copy(tmp_path / "b" / "consolidated.01.pth", tmp_path / "a" / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"tok_embeddings\.weight of different shapes"):
        read_meta_shards(tmp_path / "a", 32)


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pip install \"jaxpage\[torch\]\""):
        read_bin_files([tmp_path / "x.bin"])


@torch_only
def test_a_packed_archive_is_refused_unread(tmp_path: Path) -> None:
    """A small file could unpack to gigabytes."""
    import torch

    torch.save({"a": torch.zeros(2**20)}, tmp_path / "x.bin")
    with (
        zipfile.ZipFile(tmp_path / "x.bin") as whole,
        zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(CheckpointError, match=r"y\.bin of \d+ bytes that unpacks to \d+"):
        read_bin_files([tmp_path / "y.bin"])


def odd_tensors() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of prototypes
        return {
            "sparse": torch.eye(3).to_sparse(),
            "rows": torch.eye(3).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "meta": torch.ones(3, device="meta"),
            "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "repeated": torch.ones(1).expand(2**40),
        }


@torch_only
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "rows", "nested", "meta", "quantised", "repeated"])
def test_what_is_no_plain_array_is_named(kind: str, tmp_path: Path) -> None:
    import torch

    torch.save({"w.x": odd_tensors()[kind]}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"x\.bin") as error:
        read_bin_files([tmp_path / "x.bin"])
    assert "\n" not in str(error.value)


@torch_only
@pytest.mark.parametrize(
    "state", [{1: 0}, [1], {"a": [0]}, {"a": {"b": 0}}, {"a\nb": 0}, {"a" * 2000: 0}]
)
def test_states_of_other_shapes_are_refused(state: Any, tmp_path: Path) -> None:
    import torch

    torch.save(jax.tree.map(lambda _: torch.zeros(1), state), tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"named tensors|of the name|a text of") as error:
        read_bin_files([tmp_path / "x.bin"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    os.mkfifo(tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_bin_files([tmp_path / "x.bin"])


@torch_only
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_long_text_in_a_pickle_is_refused_at_once(is_zip: bool, tmp_path: Path) -> None:
    """torch searches its own error for quoted names, in time that goes with their square."""
    import torch

    path = tmp_path / "x.bin"
    torch.save({"a" * 100_000: torch.zeros(1)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match="a text of 100000 characters"):
        read_bin_files([path])
