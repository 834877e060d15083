"""The tokenizer inside a GGUF file, from the file's metadata.

Source of the keys: docs/gguf.md of ggml; of the defaults: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxpage.chat_template import default_template
from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.fast import FastTokenizer, LibraryErrors, put_bos_first
from jaxpage.tokenizers.pretokenizers import PreTokenizer, pre_tokenizer
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer
from jaxpage.tokenizers.sentencepiece_proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    model_proto,
)

_PREFIX = "tokenizer.ggml."
T = TypeVar("T")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer | SentencePieceTokenizer:
    """The tokenizer that `metadata` (the key-values of a GGUF file) describes.

    Raises CheckpointError when keys are missing, disagree, or name a kind that is not known.
    """
    kind = _get(metadata, "model", str)
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise CheckpointError(
        f"got tokenizer.ggml.model={kind!r}, wanted 'gpt2' (byte-level BPE) or 'llama' "
        "(sentencepiece); use a model of the LLaMA family"
    )


def _byte_level(metadata: Mapping[str, Any]) -> FastTokenizer:
    tokens, types = _tokens(metadata)
    rule = _pre_tokenizer(metadata)
    info = _info(metadata, tokens, adds_bos=rule.adds_bos)
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges", list)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if any(len(pair) != 2 for pair in merges) or len(vocab) < len(tokens):
        raise CheckpointError(
            f"got tokens of which {len(tokens) - len(vocab)} are repeated, and merges, wanted "
            "each token once and two a merge; convert the GGUF file again"
        )
    with LibraryErrors("a GGUF file's tokens and merges"):
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.takes_whole_words)
    backend = Tokenizer(model)
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    if info.adds_bos:
        put_bos_first(backend, info.special_tokens["bos_token"])
    return FastTokenizer(backend, info)


def _sentencepiece(metadata: Mapping[str, Any]) -> SentencePieceTokenizer:
    tokens, types = _tokens(metadata)
    scores = _per_token(metadata, "scores", 0.0)[: len(tokens)]
    info = _info(metadata, tokens, adds_bos=True)
    special = {
        name: tokens.index(text) if (text := info.special_tokens.get(f"{name}_token")) else None
        for name in ("unk", "bos", "eos", "pad")
    }
    if special["unk"] is not None:  # some writers call it a normal token
        types[special["unk"]] = UNKNOWN
    model = model_proto(
        zip(tokens, scores, types, strict=True),
        special_ids=special,
        has_bytes=BYTE in types,
        adds_space_prefix=_get(metadata, "add_space_prefix", bool, True),
    )
    return SentencePieceTokenizer(model, info)


def _info(metadata: Mapping[str, Any], tokens: list[str], *, adds_bos: bool) -> TokenizerInfo:
    ids = {
        name: index
        for name in ("bos", "eos", "eot", "padding", "unknown")
        if (index := _token_id(metadata, f"{name}_token_id", len(tokens))) is not None
    }
    parts = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{part}_token": tokens[ids[key]] for part, key in parts.items() if key in ids}
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        template = default_template(
            [str(metadata.get(f"general.{key}", "")) for key in ("name", "basename", "finetune")],
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
        )
    return TokenizerInfo(
        bos_token_id=ids.get("bos"),
        eos_token_ids=tuple(dict.fromkeys(ids[key] for key in ("eos", "eot") if key in ids)),
        special_tokens=special,
        adds_bos="bos" in ids and _get(metadata, "add_bos_token", bool, adds_bos),
        chat_template=template,
    )


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = _get(metadata, name, int, None)
    if value is not None and not 0 <= value < num_tokens:
        raise CheckpointError(
            f"got {_PREFIX}{name}={value}, wanted an id below {num_tokens}, the number of tokens; "
            "convert the file again"
        )
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types by id, without the unused ones at the end: they pad the embedding."""
    tokens, types = _get(metadata, "tokens", list), _per_token(metadata, "token_type", NORMAL)
    size = len(tokens)
    while size and types[size - 1] == UNUSED:
        size -= 1
    return tokens[:size], types[:size]


def _per_token(metadata: Mapping[str, Any], name: str, default: T) -> list[T]:
    """A list with an entry a token."""
    size = len(_get(metadata, "tokens", list))
    values = _get(metadata, name, list, [default] * size)
    if len(values) != size:
        raise CheckpointError(
            f"got {len(values)} entries in {_PREFIX}{name}, wanted {size}, one a token; "
            "convert the file again"
        )
    return values


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _get(metadata, "pre", str, None)
    if name is None:
        name = "default"
        warnings.warn(
            f"the GGUF file has no {_PREFIX}pre, so text is cut by llama.cpp's default rule, which "
            "may not be the model's; convert the file again",
            stacklevel=2,
        )
    return pre_tokenizer(name)


def _get(metadata: Mapping[str, Any], name: str, kind: type[T], *default: T | None) -> Any:
    """The value of a key, of the type `kind`; the default where the key is missing."""
    value = metadata.get(_PREFIX + name)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind):
        raise CheckpointError(
            f"got {_PREFIX}{name} that is {type(value).__name__}, wanted {kind.__name__}; "
            "the GGUF file has no whole tokenizer: convert it again"
        )
    return value
