"""A sentencepiece model written as the tokenizers library's `tokenizer.json`.

Transformers reads a bare tokenizer.model with merges in the order of the ids, which is not the
order of the scores: runs of spaces come out otherwise. So the merges are written out.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from jaxpage.tokenizers.fast import put_bos_first
from jaxpage.tokenizers.sentencepiece_kind import WORD_START, SentencePieceTokenizer
from jaxpage.tokenizers.sentencepiece_proto import (
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    ModelParts,
    read_model_proto,
)


def try_backend(tokenizer: SentencePieceTokenizer) -> Tokenizer | None:
    """A backend that gives the same ids, or None if the library can't express the rules."""
    parts = read_model_proto(tokenizer.model)
    kinds = {kind for i, (_, _, kind) in enumerate(parts.pieces) if i not in tokenizer.added}
    prefixes_some_parts = parts.adds_space_prefix and not tokenizer.prefixes_every_part
    if not parts.is_bpe or parts.changes_text or USER_DEFINED in kinds or prefixes_some_parts:
        return None
    unknown = next(text for text, _, kind in parts.pieces if kind == UNKNOWN)
    vocab = {text: token_id for token_id, (text, _, _) in enumerate(parts.pieces)}
    added = {token_id: token.content for token_id, token in tokenizer.added.items()}
    next_id = len(vocab)
    for token_id, text in sorted(added.items()):  # the library numbers them by itself
        if vocab.get(text, next_id) != token_id:
            return None
        next_id += text not in vocab
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(parts),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=parts.has_bytes,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", WORD_START)]
    undo: list[Any] = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if parts.adds_space_prefix:
        steps.insert(0, normalizers.Prepend(WORD_START))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    backend.add_tokens([_as_is(token) for token in tokenizer.named_tokens().values()])
    if tokenizer.info.adds_bos:
        put_bos_first(backend, tokenizer.bos_token)
    return backend


def _as_is(token: AddedToken) -> AddedToken:
    """The token to be found in the text itself, not in the normalized text, as here."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "special")}
    return AddedToken(token.content, normalized=False, **flags)


def _merges(parts: ModelParts) -> list[tuple[str, str]]:
    """Every way to make a piece of two, the best score first.

    Of equal scores the longer left part comes first: where sentencepiece takes the leftmost pair,
    a run grows from its left.
    """
    known = {text for text, _, _ in parts.pieces}
    ways = [
        (score, text[:cut], text[cut:])
        for text, score, kind in parts.pieces
        if kind == NORMAL
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    ways.sort(key=lambda way: (-way[0], -len(way[1]), -len(way[2])))
    return [(left, right) for _, left, right in ways]
