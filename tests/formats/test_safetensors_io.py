"""Our safetensors reader and writer agree with the package, and damaged files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxpage.config import DType
from jaxpage.errors import CheckpointError
from jaxpage.formats.safetensors_io import (
    INDEX_NAME,
    SINGLE_NAME,
    read_safetensors,
    shard_files,
    write_safetensors,
)

DTYPES: dict[DType, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def some(dtype: DType) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 2, 3)}
    return {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_what_the_package_wrote(dtype: DType, tmp_path: Path) -> None:
    wanted = some(dtype)
    save_file(wanted, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors([tmp_path / "x.safetensors"])
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (tensors[name].shape, tensors[name].dtype) == (value.shape, dtype)
        assert tensors[name].read().tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_package_reads_what_we_wrote(dtype: DType, tmp_path: Path) -> None:
    wanted = some(dtype)
    path = tmp_path / "x.safetensors"
    shapes = {name: value.shape for name, value in wanted.items()}
    write_safetensors(path, shapes, wanted.values(), dtype)
    found = load_file(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes()


def test_transposed_tensors_are_written_in_their_order(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "x", {"a": value.shape}, [value], "float32")
    np.testing.assert_array_equal(load_file(tmp_path / "x")["a"], value)


def raw(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        b"\xff" * 64,
        struct.pack("<Q", 8) + b"not json",
        raw([1]),
        raw({"a": 1}),
        raw({"a": {"dtype": "F32", "shape": [2]}}),
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}, b"1234"),
        raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]}}, b"1234"),
    ],
)
def test_damaged_files_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        read_safetensors([path])
    assert "\n" not in str(error.value)


def test_a_file_cut_short_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(some("float32"), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"tensor [abc]: the file is cut short"):
        read_safetensors([path])


def test_a_type_that_is_not_read_only_matters_when_read(tmp_path: Path) -> None:
    """Masks and the like may be dropped without being understood."""
    path = tmp_path / "x.safetensors"
    save_file({"mask": np.ones((2, 2), np.bool_)}, path)
    tensor = read_safetensors([path])["mask"]
    assert tensor.shape == (2, 2)
    with pytest.raises(CheckpointError, match="mask of type BOOL"):
        tensor.read()


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "1", tmp_path / "2"]
    for path in paths:
        save_file({"a": np.ones(1, np.float32)}, path)
    with pytest.raises(CheckpointError, match="tensor a twice"):
        read_safetensors(paths)


def test_an_index_chooses_between_two_copies(tmp_path: Path) -> None:
    """The copy of another run in another shard is not the model's."""
    paths = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    for number, path in enumerate(paths):
        save_file({"a": np.full(1, number, np.float32)}, path)
    for number, path in enumerate(paths):
        assert read_safetensors(paths, {"a": path.name})["a"].read() == [number]


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("nonsense", "can't be read"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": ["x"]}}', "weight_map"),
        ('{"weight_map": {"a": ""}}', "weight_map"),
        ('{"weight_map": {"a": "%s"}}' % ("x" * 300), "weight_map"),
        ('{"weight_map": {"a": "\\u0000"}}', "got "),
        ('{"weight_map": {"a": "lost.safetensors"}}', r"lost\.safetensors"),
    ],
)
def test_bad_indexes_are_refused(index: str, named: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=named):
        shard_files(tmp_path, INDEX_NAME, SINGLE_NAME)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"")
    (inside / INDEX_NAME).write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"no outside\.safetensors in .*model"):
        shard_files(inside, INDEX_NAME, SINGLE_NAME)


@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_safetensors([path])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 4]},
        [],
        None,
    ],
    ids=lambda entry: str(entry)[:40],
)
def test_headers_of_wrong_types_are_one_line(entry: object, tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        read_safetensors([path])["a"].read()
    assert "\n" not in str(error.value)
