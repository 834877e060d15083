"""The door to text: a tokenizer out of the files of a model, whatever their kind."""

from __future__ import annotations

from pathlib import Path

from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import TextStream, Tokenizer, TokenizerInfo
from jaxpage.tokenizers.gguf import tokenizer_from_gguf
from jaxpage.tokenizers.gguf_metadata import GGUF_MAGIC, read_gguf_metadata

__all__ = ["TextStream", "Tokenizer", "TokenizerInfo", "load_tokenizer", "tokenizer_from_gguf"]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model at `path`: a GGUF file.

    Raises CheckpointError when there is none, or it is damaged or of an unknown kind.
    """
    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == GGUF_MAGIC:
                return tokenizer_from_gguf(read_gguf_metadata(path))
    raise CheckpointError(f"got {path}, wanted a GGUF file with a tokenizer in it; check the path")
