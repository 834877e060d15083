"""Read PyTorch files: `pytorch_model.bin` and Meta's `consolidated.NN.pth`.

The only module that imports torch, and only when it meets such a file. Files are opened with
`weights_only=True`, which refuses arbitrary objects, and mapped, so that nothing is read early.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxpage.config import DType
from jaxpage.errors import CheckpointError
from jaxpage.formats.rules import is_derived
from jaxpage.formats.tensors import Tensor, checked_name, gathered
from jaxpage.reading import open_file, reading

BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
_SHARD_PATTERN = "consolidated.*.pth"
# Meta's model-parallel layers, by the end of the name: the axis that shards are joined along.
# Row-parallel layers split their inputs (axis 1); column-parallel ones their outputs (axis 0).
_SPLIT_AXES = {
    "wq.weight": 0,
    "wk.weight": 0,
    "wv.weight": 0,
    "wo.weight": 1,
    "w1.weight": 0,
    "w2.weight": 1,
    "w3.weight": 0,
    "output.weight": 0,
}
_LONGEST_TEXT, _MOST_PICKLE_BYTES = 1000, 16 << 20
# The magic number, the version, the system it is from, the state, the keys of the storages.
_PICKLES_OF_OLD_FILES = 5
_EMBEDDING = "tok_embeddings.weight"


def read_bin_files(
    paths: Iterable[Path], index: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Every tensor of Hugging Face's old format."""
    files = (
        (path, {name: _single(name, value, path) for name, value in _load(path).items()})
        for path in paths
    )
    return gathered(files, index or {})


def read_meta_shards(
    directory: Path, hidden_size: int
) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """Every tensor of a Meta directory, its shards joined on reading, and the shard files."""
    paths = tuple(sorted(directory.glob(_SHARD_PATTERN)))
    wanted = [directory / f"consolidated.{i:02d}.pth" for i in range(len(paths) or 1)]
    if list(paths) != wanted:
        missing = next(path.name for path in wanted if path not in paths)
        raise CheckpointError(
            f"got no {missing} in {directory}, wanted consolidated.00.pth and every shard after "
            "it; download the missing files"
        )
    shards = [_load(path) for path in paths]
    names = set(shards[0])
    for path, shard in zip(paths, shards, strict=True):
        odd = sorted(name for name in names ^ set(shard) if not is_derived(name, ()))
        if odd:
            raise CheckpointError(
                f"got tensor {odd[0]} in only some of the shards of {directory}, wanted it in "
                f"every one ({path.name} differs); download the shards again"
            )
    tensors = {
        name: _joined(
            name, [shard[name] for shard in shards if name in shard], hidden_size, directory
        )
        for name in shards[0]
    }
    return tensors, paths


def _load(path: Path) -> dict[str, Any]:
    """The state dict of one file, mapped; values are torch tensors."""
    try:
        import torch
    except ModuleNotFoundError:
        raise CheckpointError(
            f"got the PyTorch file {path} and no torch, wanted torch to read it; "
            'run pip install "jaxpage[torch]" or use safetensors'
        ) from None
    wanted = "a whole PyTorch file of tensors only"
    with open_file(path, wanted=wanted) as file:
        # Files from before PyTorch 1.6 are no zip archives and cannot be mapped.
        is_mapped = zipfile.is_zipfile(file)
        file.seek(0)
        if is_mapped:
            _check_archive(file, path)
        else:
            for _ in range(_PICKLES_OF_OLD_FILES):
                _check_pickle(file)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        except pickle.UnpicklingError as error:
            # torch's own message explains how to load the file without the safeguard.
            raise ValueError("it holds more than tensors, or is damaged") from error
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise CheckpointError(
            f"got {path} that holds more than named tensors, wanted a model's state dict; "
            "save model.state_dict() instead of a training state"
        )
    with reading(path, wanted):
        return {checked_name(name): value for name, value in state.items()}


def _check_archive(file: BinaryIO, path: Path) -> None:
    """CheckpointError for an archive that unpacks to more than its file: torch's don't."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        most = os.fstat(file.fileno()).st_size
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > most or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise CheckpointError(
                f"got {path} of {most} bytes that unpacks to {unpacked}, wanted one that "
                "torch.save wrote, which packs nothing; save it again"
            )
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as pickled:
                    _check_pickle(pickled)


def _check_pickle(stream: IO[bytes]) -> None:
    """ValueError for a text longer than any model has: torch's errors quote it and then search it.

    The time grows with the square of its length: 20 kB take ten seconds.
    """
    for _, argument, place in pickletools.genops(stream):
        if isinstance(argument, str | bytes | bytearray) and len(argument) > _LONGEST_TEXT:
            raise ValueError(f"its pickle holds a text of {len(argument)} characters")
        if place is not None and place > _MOST_PICKLE_BYTES:
            raise ValueError("its pickle is longer than any list of tensors")


def _single(name: str, value: Any, path: Path) -> Tensor:
    _check_plain(name, value, path)
    dtype, is_known = _dtype(value)

    def read() -> NDArray[Any]:
        _require(is_known, name, value, path)
        return _to_numpy(value)

    num_bytes = value.numel() * value.element_size()
    return Tensor(name=name, shape=tuple(value.shape), dtype=dtype, num_bytes=num_bytes, read=read)


def _check_plain(name: str, value: Any, path: Path) -> None:
    """CheckpointError for a tensor that is not a plain array of numbers in memory."""
    import torch

    with reading(f"tensor {name} in {path}", "an array of numbers"):
        if value.is_quantized or value.is_nested or value.layout != torch.strided:
            kind = "quantised" if value.is_quantized else "nested" if value.is_nested else "sparse"
            raise ValueError(f"it is {kind}")
        if value.device.type != "cpu" or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(f"it is a {type(value).__name__} on {value.device}")
        stored, claimed = value.untyped_storage().nbytes(), value.numel() * value.element_size()
        if claimed > stored:
            raise ValueError(f"it repeats {stored} bytes to fill {claimed}")


def _joined(name: str, values: list[Any], hidden_size: int, directory: Path) -> Tensor:
    """One tensor whose shards are joined on reading."""
    first = _single(name, values[0], directory)
    axis = _split_axis(name, values, hidden_size)
    if axis is None:
        return first
    length = sum(int(value.shape[axis]) for value in values)
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    others = {(value.dim(), value.shape[1 - axis]) for value in values if value.dim() == 2}
    if len(others) != 1 or any(value.dim() != 2 for value in values):
        raise CheckpointError(
            f"got shards of {name} of different shapes in {directory}, wanted equal ones; "
            "download the shards again"
        )

    def read() -> NDArray[Any]:
        parts = [_single(name, value, directory).read() for value in values]
        return np.concatenate(parts, axis=axis)

    return Tensor(
        name=name,
        shape=shape,
        dtype=first.dtype,
        num_bytes=first.num_bytes * len(values),
        read=read,
    )


def _split_axis(name: str, values: list[Any], hidden_size: int) -> int | None:
    """The axis to join along; None for a tensor that every shard holds whole.

    LLaMA 1 and 2 split the embedding along the hidden axis, Llama 3 along the vocabulary.
    """
    if len(values) == 1 or values[0].dim() != 2:
        return None
    if name == _EMBEDDING:
        return 0 if values[0].shape[1] == hidden_size else 1
    return next((axis for end, axis in _SPLIT_AXES.items() if name.endswith(end)), None)


def _dtype(value: Any) -> tuple[DType, bool]:
    name = str(value.dtype).removeprefix("torch.")
    known: tuple[DType, ...] = ("float32", "bfloat16", "float16")
    for dtype in known:
        if name == dtype:
            return dtype, True
    return "float32", False


def _require(is_known: bool, name: str, value: Any, path: Path) -> None:
    if not is_known:
        raise CheckpointError(
            f"got tensor {name} of type {value.dtype} in {path}, wanted float32, float16 or "
            "bfloat16; convert the weights to one of these first"
        )


def _to_numpy(value: Any) -> NDArray[Any]:
    """A NumPy view of a torch tensor; bfloat16 goes through its bits."""
    import torch

    value = value.detach()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()
