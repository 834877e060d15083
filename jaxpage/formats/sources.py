"""What a path holds, by its content: config, tensors, the rules that join them, and tokenizer.

The one place that knows all kinds of files. It reads headers only; data is read leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxpage.config import ModelConfig
from jaxpage.errors import CheckpointError
from jaxpage.formats.assemble import expand
from jaxpage.formats.converted import is_own_config
from jaxpage.formats.gguf_config import read_gguf_config
from jaxpage.formats.gguf_io import is_gguf, read_gguf
from jaxpage.formats.hf_config import hf_layout, read_hf_config
from jaxpage.formats.meta_config import meta_family, parse_meta_config, read_meta_params
from jaxpage.formats.rules import EMBEDDING, named_by_embedding, source_of
from jaxpage.formats.safetensors_io import (
    INDEX_NAME,
    SINGLE_NAME,
    read_index,
    read_safetensors,
    shard_files,
)
from jaxpage.formats.tensors import Tensor
from jaxpage.formats.torch_io import BIN_INDEX_NAME, BIN_NAME, read_bin_files, read_meta_shards
from jaxpage.models.family import Format, Rule
from jaxpage.models.registry import family_of
from jaxpage.reading import MOST_SETTINGS_BYTES, read_json, reading
from jaxpage.tokenizer import read_gguf_metadata
from jaxpage.tokenizers.hf_directory import FAST_FILE, MODEL_FILE

Kind = Format | Literal["converted"]
_TOKENIZERS = (FAST_FILE, MODEL_FILE)
_WANTED = (
    "a .gguf file, or a directory with config.json and safetensors, params.json and "
    "consolidated.NN.pth, or the output of python -m convert"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model in a foreign format, opened but not read."""

    kind: Kind
    path: Path
    config: ModelConfig
    """`config.dtype` is the dtype of the embedding as stored."""
    tensors: Mapping[str, Tensor]
    rules: tuple[Rule, ...]
    files: tuple[Path, ...]
    """The weight files, for the manifest's hashes."""
    gguf_metadata: Mapping[str, Any] | None = None


def detect(path: Path) -> Kind:
    """The kind of a file or directory; CheckpointError when it is of no known kind."""
    with reading(path, _WANTED):  # the system refuses a name that is too long
        return _detect(path)


def open_source(path: Path) -> Source:
    """Open a Hugging Face directory, a GGUF file or a Meta directory."""
    kind = detect(path)
    if kind == "gguf":
        file = read_gguf(path)
        config = read_gguf_config(file)
        rules = family_of(config).layouts[kind].rules
        return Source(kind, path, config, file.tensors, rules, (path,), file.metadata)
    if kind == "huggingface":
        return _open_huggingface(path)
    if kind == "meta":
        params = read_meta_params(path)
        tensors, files = read_meta_shards(path, params.integer("dim"))
        rules = meta_family().layouts[kind].rules
        tensors = named_by_embedding(tensors, rules)
        config = parse_meta_config(params, tensors)
        return Source(kind, path, config, tensors, rules, files)
    raise CheckpointError(
        f"got {path} that is converted already, wanted {_WANTED}; load it as it is"
    )


def find_tokenizer(path: Path) -> Path | None:
    """The file or directory that holds the tokenizer of the model at `path`, if there is one."""
    if path.is_file():
        model = read_gguf_metadata(path).get("tokenizer.ggml.model")
        return None if model in (None, "none", "no_vocab") else path
    # Meta's first download put tokenizer.model beside the model directories.
    is_meta = (path / "params.json").exists() and not (path / "config.json").exists()
    places = (path, path.resolve().parent) if is_meta else (path,)
    return next(
        (place for place in places for name in _TOKENIZERS if (place / name).exists()), None
    )


def _detect(path: Path) -> Kind:
    if not path.exists():
        raise CheckpointError(f"got no file or directory {path}, wanted {_WANTED}; check the path")
    if path.is_file():
        if is_gguf(path):
            return "gguf"
        raise CheckpointError(
            f"got the file {path} that is not GGUF, wanted {_WANTED}; give the directory"
        )
    if not path.is_dir():
        raise CheckpointError(
            f"got {path}, a pipe or a device, wanted {_WANTED}; copy it into a file"
        )
    if (path / "config.json").exists():
        is_own = is_own_config(read_json(path / "config.json", most=MOST_SETTINGS_BYTES))
        return "converted" if is_own else "huggingface"
    if (path / "params.json").exists():
        return "meta"
    raise CheckpointError(
        f"got {path} without config.json or params.json, wanted {_WANTED}; check the path"
    )


def _open_huggingface(path: Path) -> Source:
    config = read_hf_config(path)
    rules = hf_layout(config).rules
    if (path / INDEX_NAME).exists() or (path / SINGLE_NAME).exists():
        index = read_index(path, INDEX_NAME)
        files = shard_files(path, INDEX_NAME, SINGLE_NAME)
        tensors = read_safetensors(files, index)
    elif (path / BIN_INDEX_NAME).exists() or (path / BIN_NAME).exists():
        index = read_index(path, BIN_INDEX_NAME)
        files = shard_files(path, BIN_INDEX_NAME, BIN_NAME)
        tensors = read_bin_files(files, index)
    else:
        raise CheckpointError(
            f"got {path} with config.json but no weights, wanted {SINGLE_NAME}, {INDEX_NAME} or "
            f"{BIN_NAME}; download the missing files"
        )
    if index:  # a tensor that it doesn't name is used only if the model needs it
        wanted = index.keys() | {name for _, name, _ in expand(rules, config)}
        tensors = {name: tensor for name, tensor in tensors.items() if name in wanted}
    if config.tie_word_embeddings:
        tensors = named_by_embedding(tensors, rules)
    embedding = tensors.get(source_of(rules, EMBEDDING))
    if embedding is not None:
        config = replace(config, dtype=embedding.dtype)
    return Source("huggingface", path, config, tensors, rules, tuple(files))
