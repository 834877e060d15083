"""Orbax checkpoints: exact, on any layout of devices, readable by the leaf, damage told."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxpage.errors import CapacityError, CheckpointError
from jaxpage.formats import orbax_io
from jaxpage.formats.orbax_io import read_leaves, save_leaves, stored_leaves

LEAVES = {
    "embed/embedding": np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32),
    "layers_0/mlp/down/kernel": np.arange(32, dtype=np.float16).reshape(4, 8),
    "layers_0/mlp/down/bias": np.arange(5, dtype=ml_dtypes.bfloat16),
    "layers_1/mlp/down/kernel": np.full((4, 8), np.nan, np.float32),
}
UNREADABLE = r"params that can't be read .*wanted a whole Orbax"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LEAVES in several batches, which only Orbax joins."""
    directory = tmp_path_factory.mktemp("orbax") / "params"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_io, "_BATCH_BYTES", 70)
        save_leaves(directory, LEAVES.items())
    return directory


def test_shapes_and_dtypes_are_known_without_reading(saved: Path) -> None:
    found = {path: (leaf.shape, leaf.dtype) for path, leaf in stored_leaves(saved).items()}
    assert found == {path: (leaf.shape, leaf.dtype) for path, leaf in LEAVES.items()}


def test_bits_survive(saved: Path) -> None:
    loaded = dict(read_leaves(saved, stored_leaves(saved)))
    assert loaded.keys() == LEAVES.keys()
    for path, leaf in LEAVES.items():
        found = np.asarray(loaded[path])
        assert found.dtype == leaf.dtype
        assert found.tobytes() == leaf.tobytes()


def test_one_leaf_can_be_read_and_cast(saved: Path) -> None:
    path = "embed/embedding"
    wanted = {path: jax.ShapeDtypeStruct((6, 8), ml_dtypes.bfloat16)}
    ((name, found),) = read_leaves(saved, wanted)
    assert name == path
    np.testing.assert_array_equal(found, LEAVES[path].astype(ml_dtypes.bfloat16))


def over_devices(count: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), spec)


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, "x")])
def test_restores_on_one_or_two_devices_what_another_layout_saved(
    spec: PartitionSpec, tmp_path: Path
) -> None:
    value = LEAVES["embed/embedding"]
    ocp.save(str(tmp_path / "two"), {"a": {"b": jax.device_put(value, over_devices(2, spec))}})
    ((_, leaf),) = read_leaves(tmp_path / "two", stored_leaves(tmp_path / "two"))
    for sharding in (None, over_devices(1, spec), over_devices(2, PartitionSpec("x"))):
        np.testing.assert_array_equal(jax.device_put(leaf, sharding), value)


def test_plain_orbax_reads_it(saved: Path) -> None:
    tree = ocp.load(str(saved))
    np.testing.assert_array_equal(tree["embed"]["embedding"], LEAVES["embed/embedding"])


@pytest.fixture
def dropped_futures() -> Iterator[None]:
    """Orbax drops futures that failed, whose errors Python reports when it collects them: now."""
    yield
    gc.collect()


ignore_dropped = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ignore_dropped
@pytest.mark.usefixtures("dropped_futures")
@pytest.mark.parametrize("lost", ["state", "state/manifest.ocdbt", "state/_METADATA"])
def test_damage_is_told_in_one_line(saved: Path, lost: str, tmp_path: Path) -> None:
    copy = tmp_path / "params"
    shutil.copytree(saved, copy)
    gone = copy / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    wanted = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in LEAVES.items()}
    with pytest.raises(
        CheckpointError, match=r"params that can't be read .*wanted a whole Orbax"
    ) as error:
        stored_leaves(copy)
        list(read_leaves(copy, wanted))
    assert "\n" not in str(error.value)


@ignore_dropped
@pytest.mark.usefixtures("dropped_futures")
def test_lost_data_is_told(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "params"
    shutil.copytree(saved, copy)
    for data in copy.rglob("d/*"):
        data.write_bytes(b"")
    with pytest.raises(CheckpointError, match=UNREADABLE):
        list(read_leaves(copy, stored_leaves(copy)))


@ignore_dropped
@pytest.mark.usefixtures("dropped_futures")
def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wanted a whole Orbax"):
        stored_leaves(tmp_path / "none")


def test_a_relative_path_is_read_like_any_other(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent)
    found = stored_leaves(Path(saved.name))
    assert found.keys() == LEAVES.keys()
    assert dict(read_leaves(Path(saved.name), found)).keys() == LEAVES.keys()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files may not grow past 100 kB, as on a disk that is nearly full."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ignore_dropped
@pytest.mark.usefixtures("dropped_futures", "full_disk")
def test_a_disk_that_fills_up_is_one_line(tmp_path: Path) -> None:
    value = np.random.default_rng(0).standard_normal(100_000)
    with pytest.raises(CheckpointError, match="that Orbax can't write") as error:
        save_leaves(tmp_path / "params", [("a", value)])
    assert "\n" not in str(error.value)


def test_what_the_leaves_raise_passes(tmp_path: Path) -> None:
    def leaves() -> Iterator[tuple[str, np.ndarray]]:
        yield "a", np.ones(1)
        raise CapacityError("full")

    with pytest.raises(CapacityError, match=r"^full$"):
        save_leaves(tmp_path / "params", leaves())


def test_arrays_larger_than_their_files_are_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax would make what isn't there, however large it claims to be; here any size is."""
    monkeypatch.setattr(orbax_io, "_MOST_PACKING", 0)
    claimed = sum(leaf.nbytes for leaf in LEAVES.values())
    with pytest.raises(CheckpointError, match=f"claims {claimed} bytes"):
        stored_leaves(saved)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_a_list_that_is_too_long_is_not_read(saved: Path, name: str, tmp_path: Path) -> None:
    copy = tmp_path / "params"
    shutil.copytree(saved, copy)
    with (copy / "state" / name).open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match=f"{name} in it has 1099511627776 bytes"):
        stored_leaves(copy)


def test_a_pipe_among_the_files_is_not_waited_for(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "params"
    shutil.copytree(saved, copy)
    (copy / "state" / "_METADATA").unlink()
    os.mkfifo(copy / "state" / "_METADATA")
    with pytest.raises(CheckpointError, match="_METADATA in it is no regular file"):
        stored_leaves(copy)
