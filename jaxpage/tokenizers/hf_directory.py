"""The tokenizer of a Hugging Face or Meta directory.

`tokenizer.json` holds everything but the roles of special tokens; `tokenizer.model` only a
vocabulary. The rest is in the small JSON files beside them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, processors

from jaxpage.errors import CheckpointError
from jaxpage.reading import read_bytes, reading
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.ends import all_ends
from jaxpage.tokenizers.fast import FastTokenizer, put_bos_first, special_tokens
from jaxpage.tokenizers.hf_settings import MOST_TOKENS, Settings, read_settings
from jaxpage.tokenizers.json_file import read_backend
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer, processor_of
from jaxpage.tokenizers.tiktoken_file import is_tiktoken, tokenizer_from_tiktoken

FAST_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"
_FASTS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that leave BOS to tokenizer.json, whatever their settings say."""


def tokenizer_from_directory(directory: Path) -> FastTokenizer | SentencePieceTokenizer:
    """The tokenizer of the files in `directory`: tokenizer.json, else tokenizer.model.

    Raises CheckpointError when there is neither, or one is damaged or of an unknown kind.
    """
    settings = read_settings(directory)
    with reading(directory, "a tokenizer"):
        if os.path.lexists(directory / FAST_FILE):
            return _fast(settings, read_backend(directory / FAST_FILE))
        path = directory / MODEL_FILE
        if os.path.lexists(path):
            data = read_bytes(path, wanted="a sentencepiece or tiktoken model")
            if is_tiktoken(data):
                return _tiktoken(settings, data)
            return _sentencepiece(settings, data, str(path))
    raise CheckpointError(
        f"got {directory} without a tokenizer, wanted {FAST_FILE} or {MODEL_FILE} in it; "
        "copy the model's tokenizer files there"
    )


def _tiktoken(settings: Settings, data: bytes) -> FastTokenizer:
    names = {token_id: token.content for token_id, token in settings.added.items()}
    tokenizer = tokenizer_from_tiktoken(data, names=names)
    return _fast(settings, tokenizer.backend, tokenizer.info)


def _fast(
    settings: Settings, backend: tokenizers.Tokenizer, known: TokenizerInfo | None = None
) -> FastTokenizer:
    """The tokenizer of a whole backend; `known`: defaults for what the settings leave out."""
    known = known or TokenizerInfo()
    _add_tokens(backend, settings)
    texts = {**known.special_tokens, **settings.special_tokens}
    bos = texts.get("bos_token")
    bos_id = None if bos is None else backend.token_to_id(bos)
    adds_bos = _choose_bos(backend, settings, bos, adds_bos=known.adds_bos)
    own = [backend.token_to_id(text) for text in (*settings.ends, texts.get("eos_token", ""))]
    named = [*settings.end_ids, *known.eos_token_ids, *(i for i in own if i is not None)]
    ends = all_ends(named, special_tokens(backend))
    info = _info(settings, texts, bos_id=bos_id, ends=ends, adds_bos=adds_bos)
    tokenizer = FastTokenizer(backend, info)
    if not 0 < tokenizer.vocab_size <= MOST_TOKENS:
        raise CheckpointError(
            f"got {settings.directory} with a vocabulary of {tokenizer.vocab_size} ids, wanted 1 "
            f"to {MOST_TOKENS}; download its tokenizer again"
        )
    return tokenizer


def _choose_bos(
    backend: tokenizers.Tokenizer, settings: Settings, bos: str | None, *, adds_bos: bool
) -> bool:
    """Whether BOS goes before a text; makes `backend` do so. Settings overrule the file."""
    bos_id = None if bos is None else backend.token_to_id(bos)
    has_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    says = (
        None if settings.said.get("tokenizer_class") in _FASTS else settings.flag("add_bos_token")
    )
    wants_bos = (has_bos or adds_bos if says is None else says) and bos_id is not None
    if bos is not None and wants_bos and not has_bos:
        put_bos_first(backend, bos)
    elif has_bos and not wants_bos:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return wants_bos


def _add_tokens(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    """Adds tokens named beside the file, in Hugging Face's order, which decides new ids."""
    known = backend.get_added_tokens_decoder().values()
    states = {repr(token) for token in known}
    # Special: tokens with a role, and those that the file calls so, which no later flag undoes.
    special = {t.content for t in (*settings.parts.values(), *(t for t in known if t.special))}
    given = {token.content for token in settings.added.values()}
    tokens = [token for _, token in sorted(settings.added.items()) if repr(token) not in states]
    tokens += [t for t in known if t.content in special - given and not t.special]
    for token in tokens:
        token.special = token.special or token.content in special
    texts = {token.content for token in (*known, *tokens)}
    tokens += [token for token in settings.named if token.content not in texts]
    backend.add_tokens(tokens)
    moved = {
        token.content: (token_id, backend.token_to_id(token.content))
        for token_id, token in settings.added.items()
        if backend.token_to_id(token.content) != token_id
    }
    for text, (token_id, found) in list(moved.items())[:1]:
        warnings.warn(
            f"{settings.directory} gives the token {text!r} the id {token_id}, but with its "
            f"vocabulary it is {found}, as in Hugging Face; {len(moved)} added tokens differ",
            stacklevel=2,
        )


def _sentencepiece(settings: Settings, data: bytes, source: str) -> SentencePieceTokenizer:
    processor = processor_of(data, source)
    pieces = range(processor.GetPieceSize())
    control = {i for i in pieces if processor.IsControl(i) or processor.IsUnknown(i)}
    added = _added_to(processor, control, settings)
    find = partial(_find, processor, {token.content: i for i, token in added.items()})
    special = dict(settings.special_tokens)
    for part in ("bos", "eos", "unk", "pad"):
        if (token_id := getattr(processor, f"{part}_id")()) >= 0:
            special.setdefault(f"{part}_token", processor.IdToPiece(token_id))
    for token_id, token in added.items():  # special in the model, or by its role
        token.special |= token_id in control or token.content in special.values()
    own = [find(text) for text in (*settings.ends, special.get("eos_token"))]
    named = [*settings.end_ids, *(i for i in own if i is not None)]
    texts = {processor.IdToPiece(i): i for i in control}
    texts |= {token.content: i for i, token in added.items() if token.special}
    bos_id = find(special.get("bos_token"))
    says = settings.flag("add_bos_token") is not False and bos_id is not None
    info = _info(settings, special, bos_id=bos_id, ends=all_ends(named, texts), adds_bos=says)
    return SentencePieceTokenizer(
        data,
        info,
        added=added,
        prefixes_every_part=settings.said.get("legacy") is not False,
        prefixes_text=settings.flag("add_prefix_space") is not False,
        source=source,
    )


def _added_to(
    processor: SentencePieceProcessor, control: set[int], settings: Settings
) -> dict[int, AddedToken]:
    """Tokens beside the pieces, and pieces that a role makes special; by id."""
    added = dict(settings.added)
    id_of = {token.content: token_id for token_id, token in added.items()}
    for token in settings.named:
        token_id = _find(processor, id_of, token.content)
        if token_id is None:  # as Hugging Face numbers them
            token_id = max(processor.GetPieceSize(), 1 + max(added, default=-1))
        if token_id not in control:
            id_of[token.content] = token_id
            added.setdefault(token_id, token)
    return added


def _find(
    processor: SentencePieceProcessor, added: Mapping[str, int], text: str | None
) -> int | None:
    """The id of an added token or a piece; None if no token has this text."""
    piece_id = processor.PieceToId(text or "")
    found = piece_id if processor.IdToPiece(piece_id) == text else None
    return added.get(text or "", found)


def _info(
    settings: Settings,
    special: Mapping[str, str],
    *,
    bos_id: int | None,
    ends: tuple[int, ...],
    adds_bos: bool,
) -> TokenizerInfo:
    return TokenizerInfo(
        bos_token_id=bos_id,
        eos_token_ids=ends,
        special_tokens=special,
        adds_bos=adds_bos,
        chat_template=settings.chat_template(special),
        additional_special_tokens=tuple(token.content for token in settings.extra),
    )
