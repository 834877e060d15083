"""The tokenizer inside a GGUF file, from the file's metadata.

Source of the keys: docs/gguf.md of ggml; of the defaults: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.fast import FastTokenizer
from jaxpage.tokenizers.pretokenizers import pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_PREFIX = "tokenizer.ggml."
T = TypeVar("T")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer:
    """The tokenizer that `metadata` (the key-values of a GGUF file) describes.

    Raises CheckpointError when keys are missing, disagree, or name a kind that is not known.
    """
    kind = _get(metadata, "model", str)
    if kind == "gpt2":
        return _byte_level(metadata)
    raise CheckpointError(
        f"got tokenizer.ggml.model={kind!r}, wanted 'gpt2' (byte-level BPE) or 'llama' "
        "(sentencepiece); use a model of the LLaMA family"
    )


def _byte_level(metadata: Mapping[str, Any]) -> FastTokenizer:
    tokens = _get(metadata, "tokens", list)
    types = _get(metadata, "token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise _disagree("token_type", len(types), len(tokens))
    rule = pre_tokenizer(_get(metadata, "pre", str, "default"))
    adds_bos = _get(metadata, "add_bos_token", bool, rule.adds_bos)
    info = _info(metadata, len(tokens), adds_bos=adds_bos)
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges", list)]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=rule.takes_whole_words,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    add_bos(backend, info)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return FastTokenizer(backend, info)


def add_bos(backend: Tokenizer, info: TokenizerInfo) -> None:
    """Makes `backend` put BOS before a text, when `info` says so."""
    if not info.adds_bos or info.bos_token_id is None:
        return
    token = backend.id_to_token(info.bos_token_id)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, info.bos_token_id)],
    )


def _info(metadata: Mapping[str, Any], num_tokens: int, *, adds_bos: bool) -> TokenizerInfo:
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "padding", "unknown"):
        value = _get(metadata, f"{name}_token_id", int, None)
        if value is not None and not 0 <= value < num_tokens:
            raise CheckpointError(
                f"got {_PREFIX}{name}_token_id={value}, wanted an id below {num_tokens}, the "
                "number of tokens; convert the file again"
            )
        ids[name] = value
    ends = dict.fromkeys(index for name in ("eos", "eot") if (index := ids[name]) is not None)
    template = metadata.get("tokenizer.chat_template")
    return TokenizerInfo(
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(ends),
        adds_bos=adds_bos and ids["bos"] is not None,
        chat_template=template if isinstance(template, str) else None,
        pad_token_id=ids["padding"],
        unk_token_id=ids["unknown"],
    )


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


def _disagree(name: str, got: int, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"got {got} entries in {_PREFIX}{name}, wanted {wanted}, one a token; "
        "convert the file again"
    )
