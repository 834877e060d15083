"""Read and write safetensors without torch, bfloat16 included.

The header is parsed here because the package's NumPy reader has no bfloat16 and copies; ours maps
the file. Source of the layout: README of the safetensors repository.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxpage.config import DType
from jaxpage.errors import CheckpointError
from jaxpage.formats.tensors import Tensor, checked_name, gathered, map_file
from jaxpage.reading import MOST_JSON_BYTES, read_json, reading

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MOST_DIMS = 8
_DTYPES: dict[str, tuple[DType, np.dtype[Any]]] = {
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
}


def read_index(directory: Path, index_name: str) -> dict[str, str]:
    """Tensor -> the name of its file, as a directory's index says; empty without an index."""
    index = directory / index_name
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(name, str) and _is_name(Path(name).name) for name in files):
        raise CheckpointError(
            f"got {index} without a weight_map, wanted tensor names and their files; "
            "download it again"
        )
    # Only the last part of a path, so that an index can't point out of its directory.
    return {str(name): Path(file).name for name, file in dict(weight_map or {}).items()}


def _is_name(name: str) -> bool:
    return 0 < len(name) < 256 and name.isprintable()


def shard_files(directory: Path, index_name: str, single_name: str) -> list[Path]:
    """The weight files of a directory; CheckpointError when the index names one that is missing."""
    names = sorted(set(read_index(directory, index_name).values())) or [single_name]
    paths = [directory / name for name in names]
    for path in paths:
        with reading(path, "a file of weights"):
            is_there = path.exists()
        if not is_there:
            raise CheckpointError(
                f"got no {path.name} in {directory}, wanted all {len(paths)} files that "
                f"{index_name} names; download the missing one"
            )
    return paths


def read_safetensors(
    paths: Iterable[Path], index: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Every tensor of the files; CheckpointError for a damaged file or an unexplained copy."""
    return gathered(((path, _read_file(path)) for path in paths), index or {})


def _read_file(path: Path) -> dict[str, Tensor]:
    buffer = map_file(path, "safetensors")
    with reading(path, "a whole safetensors file"):
        (header_bytes,) = struct.unpack_from("<Q", buffer)
        start = 8 + header_bytes
        if start > len(buffer) or header_bytes > MOST_JSON_BYTES:
            raise ValueError(f"its header of {header_bytes} bytes is longer than it may be")
        header = json.loads(buffer[8:start])
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        return {
            name: _tensor(path, buffer, name, entry, start)
            for name, entry in header.items()
            if name != "__metadata__"
        }


def _tensor(
    path: Path, buffer: mmap.mmap, name: str, entry: Mapping[str, Any], start: int
) -> Tensor:
    checked_name(name)
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    # Within 64 bits, so that products of sizes stay small numbers.
    if len(shape) > _MOST_DIMS or not all(
        type(number) is int and 0 <= number < 2**63 for number in (begin, end, *shape)
    ):
        raise ValueError(f"tensor {name} has offsets or a shape that are none")
    if begin > end:
        raise ValueError(f"tensor {name} has offsets {begin}..{end}")
    if start + end > len(buffer):
        raise CheckpointError(
            f"got {path} of {len(buffer)} bytes, wanted at least {start + end} for tensor {name}: "
            "the file is cut short; download it again"
        )
    type_name = ascii(entry["dtype"])[1:-1][:80]
    dtype, numpy_dtype = _DTYPES.get(type_name, ("float32", None))
    size = math.prod(shape)
    if numpy_dtype is not None and size * numpy_dtype.itemsize != end - begin:
        raise ValueError(f"tensor {name} of shape {list(shape)} has {end - begin} bytes")

    def read() -> NDArray[Any]:
        if numpy_dtype is None:
            raise CheckpointError(
                f"got tensor {name} of type {type_name} in {path}, wanted F32, F16 or BF16; "
                "convert the weights to one of these first"
            )
        return np.frombuffer(buffer, numpy_dtype, size, start + begin).reshape(shape)

    return Tensor(name=name, shape=shape, dtype=dtype, num_bytes=end - begin, read=read)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[NDArray[Any]],
    dtype: DType,
) -> None:
    """Write tensors of one dtype, in the order of `shapes`, holding one at a time."""
    type_name = next(name for name, (known, _) in _DTYPES.items() if known == dtype)
    itemsize = _DTYPES[type_name][1].itemsize
    # transformers refuses files that don't say which framework's layout they follow.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": type_name, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.shape == shape, f"{name} has shape {tensor.shape}, not {shape}"
            # A bfloat16 array has no buffer; a view of its bits has.
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
