"""The tokenizer inside a GGUF file, from the file's metadata.

What llama.cpp warns of and repairs (ids out of range, tokens without text) is no error here.
Source of the keys: docs/gguf.md of ggml; of the defaults: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxpage.errors import CheckpointError
from jaxpage.reading import reading
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.default_templates import default_template
from jaxpage.tokenizers.ends import all_ends
from jaxpage.tokenizers.fast import FastTokenizer, put_bos_first
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
_SOURCE = "a GGUF file's vocabulary"
_PARTS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
"""By our name the file's, "seperator" as it is spelt there."""
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids that hold in a sentencepiece vocabulary which says nothing else."""
_NAMED = (UNKNOWN, CONTROL, USER_DEFINED)
"""Types of the tokens that are cut out of a text before it is encoded."""
T = TypeVar("T")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer | SentencePieceTokenizer:
    """The tokenizer that `metadata` (the key-values of a GGUF file) describes.

    Raises CheckpointError when keys are missing, disagree, or name a kind that is not known.
    """
    kind = _get(metadata, "model", str)
    with reading(_SOURCE, "a whole tokenizer"):
        if kind == "gpt2":
            return _byte_level(metadata)
        if kind == "llama":
            return _sentencepiece(metadata)
    raise CheckpointError(
        f"got tokenizer.ggml.model={kind!r}, wanted 'gpt2' (byte-level BPE) or 'llama' "
        "(sentencepiece); use a model of the LLaMA family"
    )


def special_id(
    metadata: Mapping[str, Any], name: str, num_tokens: int, *, source: object = "the GGUF file"
) -> int | None:
    """The id of a special token ("bos", "eot", ...) in the file, else the format's; or None.

    An id beyond the tokens is warned of, and the format's default taken instead, as in llama.cpp.
    Raises CheckpointError for a value of another type. `source` names the file.
    """
    key = f"{_PREFIX}{name}_token_id"
    is_sentencepiece = metadata.get(_PREFIX + "model") == "llama"
    default = _SENTENCEPIECE_IDS.get(name) if is_sentencepiece else None
    if default is not None and default >= num_tokens:
        default = None
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(
            f"got {key}={reprlib.repr(value)} in {source}, wanted a token id; convert it again"
        )
    if 0 <= value < num_tokens:
        return value
    warnings.warn(
        f"got {key}={value} in {source} beside {num_tokens} tokens; "
        f"{'no token' if default is None else f'the default, {default},'} is taken for it",
        stacklevel=2,
    )
    return default


def _byte_level(metadata: Mapping[str, Any]) -> FastTokenizer:
    tokens, types = _tokens(metadata)
    rule = _pre_tokenizer(metadata)
    info = _info(metadata, tokens, types, adds_bos=rule.adds_bos)
    written: list[str] = _list(metadata, "merges", str)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in written)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if not all(map(all, merges)) or len(vocab) < len(tokens):
        raise CheckpointError(
            f"got tokens of which {len(tokens) - len(vocab)} are repeated, and merges, wanted "
            "each token once and two a merge; convert the GGUF file again"
        )
    with reading("a GGUF file's tokens and merges", "those of one vocabulary"):
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.takes_whole_words)
    backend = Tokenizer(model)
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _NAMED
        ]
    )
    if info.adds_bos:
        put_bos_first(backend, info.special_tokens["bos_token"])
    return FastTokenizer(backend, info)


def _sentencepiece(metadata: Mapping[str, Any]) -> SentencePieceTokenizer:
    tokens, types = _tokens(metadata)
    scores = [float(score) for score in _per_token(metadata, "scores", (float, int), 0.0)]
    if any(math.isnan(score) for score in scores):
        raise _bad("scores that are no numbers", "a score for each token")
    info = _info(metadata, tokens, types, adds_bos=True)
    special = {
        name: tokens.index(text) if (text := info.special_tokens.get(f"{name}_token")) else None
        for name in ("unk", "bos", "eos", "pad")
    }
    if special["unk"] is not None:  # some writers call it a normal token
        types[special["unk"]] = UNKNOWN
    model = model_proto(
        zip(tokens, scores, types, strict=False),
        special_ids=special,
        has_bytes=BYTE in types,
        adds_space_prefix=_get(metadata, "add_space_prefix", bool, True),
    )
    named = {
        index: AddedToken(tokens[index], normalized=False)
        for index, kind in enumerate(types)
        if kind == USER_DEFINED
    }
    return SentencePieceTokenizer(model, info, added=named, source=_SOURCE)


def _info(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    *,
    adds_bos: bool,
) -> TokenizerInfo:
    ids = {
        name: index
        for name in (*_PARTS.values(), "mask", "eot", "eom")
        if (index := special_id(metadata, name, len(tokens))) is not None
    }
    special = {f"{part}_token": tokens[ids[key]] for part, key in _PARTS.items() if key in ids}
    named = {token: index for index, token in enumerate(tokens) if types[index] in _NAMED}
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        template = default_template(
            [str(metadata.get(f"general.{key}", "")) for key in ("name", "basename", "finetune")],
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
        )
    return TokenizerInfo(
        bos_token_id=ids.get("bos"),
        eos_token_ids=all_ends([ids[key] for key in ("eos", "eot", "eom") if key in ids], named),
        special_tokens=special,
        adds_bos="bos" in ids and _get(metadata, "add_bos_token", bool, adds_bos),
        chat_template=template,
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types by id, without the unused ones at the end: they pad the embedding."""
    tokens = list(_list(metadata, "tokens", str))
    types = [int(kind) for kind in _per_token(metadata, "token_type", (int,), NORMAL)]
    size = len(tokens)
    while size and types[size - 1] == UNUSED:
        size -= 1
    if not size:
        raise _bad("no tokens", "a vocabulary")
    empty = [index for index in range(size) if not tokens[index]]
    for index in empty:
        tokens[index], types[index] = f"[EMPTY_{index}]", UNUSED
    if empty:
        warnings.warn(
            f"the GGUF file has {len(empty)} tokens without text, the first with the id "
            f"{empty[0]}; they are never produced by a text",
            stacklevel=2,
        )
    return tokens[:size], types[:size]


def _list(
    metadata: Mapping[str, Any], name: str, kind: type[T] | tuple[type, ...], *default: list[T]
) -> list[T]:
    values = _get(metadata, name, list, *default)
    if not all(isinstance(value, kind) for value in values):
        found = {type(value).__name__ for value in values[:1000]}
        raise _bad(f"{_PREFIX}{name} with {', '.join(sorted(found))} in it", "one type of value")
    return values


def _per_token(
    metadata: Mapping[str, Any], name: str, kind: tuple[type, ...], default: T
) -> list[T]:
    """A list with an entry a token."""
    size = len(_get(metadata, "tokens", list))
    values: list[T] = _list(metadata, name, kind, [default] * size)
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
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(
            f"got {_PREFIX}{name} that is {type(value).__name__}, wanted {kind.__name__}; "
            "the GGUF file has no whole tokenizer: convert it again"
        )
    return value


def _bad(what: str, wanted: str) -> CheckpointError:
    return CheckpointError(f"got a GGUF file with {what}, wanted {wanted}; convert it again")
