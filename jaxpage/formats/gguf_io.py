"""Read GGUF files: metadata and tensors, straight from a memory map.

The `gguf` package's reader spends seconds on the strings of a vocabulary, so only its dequantisers
are used, for tensor types without a fast path of ours. Knows nothing of models: it hands out
names, shapes and arrays.
Source of the layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxpage.config import MOST_LAYERS, DType
from jaxpage.errors import CheckpointError
from jaxpage.formats.tensors import Tensor, checked_name, map_file
from jaxpage.reading import open_file, reading
from jaxpage.tokenizers.gguf_metadata import GGUF_MAGIC, GgufReader

_MAX_DIMS = 8
_MOST_ALIGNMENT = 2**16
# A layer has nine tensors and a model a few more; no config may have more than MOST_LAYERS.
_MOST_TENSORS = 10 * MOST_LAYERS
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
# Blocks dequantised at once; small, so that every pass stays in the CPU's fastest caches.
_CHUNK_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One parsed GGUF file; `tensors` read lazily from the map."""

    path: Path
    metadata: Mapping[str, Any]
    """Each value is read when it is looked up."""
    tensors: dict[str, Tensor]
    stored_dtype: DType
    """dtype of the embedding; float32 if it is quantised."""


def is_gguf(path: Path) -> bool:
    """True when the file starts with the GGUF magic."""
    with open_file(path, wanted="a GGUF file") as file:
        return file.read(4) == GGUF_MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Parse header and tensor table; CheckpointError for anything that isn't a whole GGUF file."""
    buffer = map_file(path, "GGUF")
    with reading(path, "a whole GGUF file"):
        return _parse(path, buffer)


def _parse(path: Path, buffer: mmap.mmap) -> GgufFile:
    reader = GgufReader(buffer, str(path))
    metadata = reader.metadata()
    if reader.num_tensors > _MOST_TENSORS:
        raise ValueError(f"it claims {reader.num_tensors} tensors")
    infos = [_read_info(reader) for _ in range(reader.num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-reader.position // alignment) * alignment
    tensors = {info.name: _tensor(path, buffer, info, start) for info in infos}
    embedding = tensors.get("token_embd.weight")
    dtype: DType = "float32" if embedding is None else embedding.dtype
    return GgufFile(path, metadata, tensors, dtype)


@dataclass(frozen=True, slots=True)
class _Info:
    """One row of the tensor table; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_info(reader: GgufReader) -> _Info:
    name, num_dims = checked_name(reader.string()), reader.number(_U32)
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    # GGUF stores the fastest axis first; reversed it is the row-major shape.
    shape = tuple(reader.number(_U64) for _ in range(num_dims))[::-1]
    return _Info(name, shape, reader.number(_U32), reader.number(_U64))


def _tensor(path: Path, buffer: mmap.mmap, info: _Info, start: int) -> Tensor:
    """A tensor of the table; `start` is where the data begins."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind, begin = info.name, info.shape, info.kind, start + info.offset
    try:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"got tensor {name} of unknown GGML type {kind} in {path}, wanted a type that the gguf "
            "package knows; update gguf or quantise the model to another type"
        ) from None
    num_bytes = math.prod(shape) // block_size * block_bytes
    if not shape or shape[-1] % block_size:
        raise ValueError(f"tensor {name} of shape {shape} is not in whole blocks of {block_size}")
    if begin + num_bytes > len(buffer):
        raise CheckpointError(
            f"got {path} of {len(buffer)} bytes, wanted at least {begin + num_bytes} for tensor "
            f"{name}: the file is cut short; download it again"
        )
    dtype: DType = "bfloat16" if kind == _BF16 else "float16" if kind == _F16 else "float32"
    type_name = GGMLQuantizationType(kind).name

    def read() -> NDArray[Any]:
        raw = np.frombuffer(buffer, np.uint8, num_bytes, begin)
        return _decode(raw, shape, kind, f"{name} ({type_name}) in {path}")

    return Tensor(name=name, shape=shape, dtype=dtype, num_bytes=num_bytes, read=read)


def _decode(raw: NDArray[np.uint8], shape: tuple[int, ...], kind: int, what: str) -> NDArray[Any]:
    """The tensor's values: stored floats as they are, quantised types as float32."""
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind]).reshape(shape)
    if kind in _FAST:
        block_bytes, fill = _FAST[kind]
        return _decode_blocks(raw.reshape(-1, block_bytes), fill).reshape(shape)
    import gguf

    rows = raw.reshape(*shape[:-1], -1)
    try:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(kind)).reshape(shape)
    except NotImplementedError:
        raise CheckpointError(
            f"got tensor {what}, wanted a type that the gguf package dequantises; "
            "quantise the model to another type, for example Q8_0"
        ) from None


def _decode_blocks(
    blocks: NDArray[np.uint8], fill: Callable[[NDArray[np.uint8], NDArray[np.float32]], None]
) -> NDArray[np.float32]:
    """[blocks, bytes] -> [blocks, 32], a cache-sized run of blocks at a time."""
    out = np.empty((len(blocks), 32), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        stop = start + _CHUNK_BLOCKS
        fill(blocks[start:stop], out[start:stop])
    return out


def _half(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The float16 at byte `start` of every block, [blocks, 1] in float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _fill_q4_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Scale d, 16 bytes: low nibbles are values 0..15, high nibbles 16..31; minus 8, times d."""
    nibbles = blocks[:, 2:18]
    out[:, :16] = nibbles & 15
    out[:, 16:] = nibbles >> 4
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _fill_q4_1(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Scale d, minimum m, 16 bytes of nibbles as in Q4_0; times d, plus m."""
    nibbles = blocks[:, 4:20]
    out[:, :16] = nibbles & 15
    out[:, 16:] = nibbles >> 4
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _fill_q8_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Scale d, 32 signed bytes; times d."""
    out[:] = blocks[:, 2:34].view(np.int8)
    out *= _half(blocks, 0)


_PLAIN: dict[int, np.dtype[Any]] = {
    _F32: np.dtype("<f4"),
    _F16: np.dtype("<f2"),
    _BF16: np.dtype(ml_dtypes.bfloat16),
}
_FAST: dict[int, tuple[int, Callable[[NDArray[np.uint8], NDArray[np.float32]], None]]] = {
    _Q4_0: (18, _fill_q4_0),
    _Q4_1: (20, _fill_q4_1),
    _Q8_0: (34, _fill_q8_0),
}
