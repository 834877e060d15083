"""A tokenizer from a model's files, of whatever kind, and back into files."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.reading import reading
from jaxpage.tokenizers.base import ChatPrompt, TextStream, Tokenizer, TokenizerInfo
from jaxpage.tokenizers.ends import all_ends
from jaxpage.tokenizers.fast import FastTokenizer, special_tokens
from jaxpage.tokenizers.gguf import tokenizer_from_gguf
from jaxpage.tokenizers.gguf_metadata import read_gguf_metadata
from jaxpage.tokenizers.hf_directory import tokenizer_from_directory
from jaxpage.tokenizers.hf_settings import PARTS
from jaxpage.tokenizers.saving import write_tokenizer
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer

__all__ = [
    "ChatPrompt",
    "TextStream",
    "Tokenizer",
    "TokenizerInfo",
    "as_tokenizer",
    "load_tokenizer",
    "read_gguf_metadata",
    "save_tokenizer",
    "tokenizer_from_gguf",
]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model at `path`: a GGUF file, or a directory (or a file in it) with
    tokenizer.json or tokenizer.model, sentencepiece's or Llama 3's, told apart by content.

    Raises CheckpointError when there is none, or it is damaged or of an unknown kind.
    """
    path = Path(path)
    with reading(path, "a directory with a tokenizer or a GGUF file"):
        if path.is_dir():
            return tokenizer_from_directory(path)
        if not path.is_file():
            raise CheckpointError(
                f"got {path}, wanted a directory with a tokenizer or a GGUF file; check the path"
            )
        if path.name in ("tokenizer.json", "tokenizer.model"):
            return tokenizer_from_directory(path.parent)
        return tokenizer_from_gguf(read_gguf_metadata(path))


def as_tokenizer(source: object) -> Tokenizer:
    """A tokenizer from a tokenizer, a path, an object of the tokenizers library, or a fast
    tokenizer of transformers.

    Raises ConfigError for anything else.
    """
    if isinstance(source, Tokenizer):
        return source
    if isinstance(source, (str, Path)):
        return load_tokenizer(source)
    if isinstance(source, tokenizers.Tokenizer):
        ends = all_ends((), special_tokens(source))
        return FastTokenizer(source, TokenizerInfo(eos_token_ids=ends))
    backend = getattr(source, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return FastTokenizer(backend, _info_of(source, backend))
    raise ConfigError(
        f"got a tokenizer of type {type(source).__name__}, wanted one of load_tokenizer, of the "
        "tokenizers library or a fast one of transformers; pass the path of the model instead"
    )


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Writes `tokenizer` into `directory` in Hugging Face's form, so that it loads as it was.

    Raises ConfigError for a tokenizer that `load_tokenizer` didn't make.
    """
    if not isinstance(tokenizer, (FastTokenizer, SentencePieceTokenizer)):
        raise ConfigError(
            f"got a tokenizer of type {type(tokenizer).__name__}, wanted one of load_tokenizer; "
            "save it with the library it comes from"
        )
    write_tokenizer(tokenizer, Path(directory))


def _info_of(source: object, backend: tokenizers.Tokenizer) -> TokenizerInfo:
    """What an object of transformers says of itself; transformers need not be imported."""
    special = {part: text for part in PARTS if isinstance(text := getattr(source, part, None), str)}
    bos_id, eos_id, template = (
        getattr(source, name, None) for name in ("bos_token_id", "eos_token_id", "chat_template")
    )
    return TokenizerInfo(
        bos_token_id=bos_id,
        eos_token_ids=all_ends(() if eos_id is None else (eos_id,), special_tokens(backend)),
        special_tokens=special,
        adds_bos=bos_id is not None and backend.encode("").ids[:1] == [bos_id],
        chat_template=template if isinstance(template, str) else None,
    )
