"""The tokenizer of a Hugging Face or Meta directory.

`tokenizer.json` holds everything but the parts that special tokens play; `tokenizer.model` only a
vocabulary. What else there is stands in the small JSON files beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxpage.chat_template import default_template
from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.fast import FastTokenizer, LibraryErrors, put_bos_first
from jaxpage.tokenizers.sentencepiece_kind import (
    AddedToken,
    SentencePieceTokenizer,
    processor_of,
)
from jaxpage.tokenizers.tiktoken_file import is_tiktoken, tokenizer_from_tiktoken

FAST_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"
CONFIG_FILE, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"
PARTS = ("bos_token", "eos_token", "unk_token", "pad_token")
Json = dict[str, Any]


def tokenizer_from_directory(directory: Path) -> FastTokenizer | SentencePieceTokenizer:
    """The tokenizer of the files in `directory`: tokenizer.json, else tokenizer.model.

    Raises CheckpointError when there is neither, or one is damaged or of an unknown kind.
    """
    settings = _read_json(directory / CONFIG_FILE)
    if (directory / FAST_FILE).is_file():
        return _fast(directory, settings)
    if (directory / MODEL_FILE).is_file():
        data = _read(directory / MODEL_FILE)
        if is_tiktoken(data):
            return _tiktoken(directory, settings, data)
        return _sentencepiece(directory, settings, data)
    raise CheckpointError(
        f"got {directory} without a tokenizer, wanted {FAST_FILE} or {MODEL_FILE} in it; "
        "copy the model's tokenizer files there"
    )


def _fast(directory: Path, settings: Json) -> FastTokenizer:
    with LibraryErrors(str(directory / FAST_FILE)):
        backend = tokenizers.Tokenizer.from_buffer(_read(directory / FAST_FILE))
    backend.no_padding()
    backend.no_truncation()
    special = _special_tokens(directory, settings)
    ids = {
        part: token_id
        for part, text in special.items()
        if (token_id := backend.token_to_id(text)) is not None
    }
    marked = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(special[part], normalized=False)
            for part in ids
            if special[part] not in marked
        ]
    )
    bos_id = ids.get("bos_token")
    has_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    wants_bos = settings.get("add_bos_token", has_bos) and bos_id is not None
    if wants_bos and not has_bos:  # what the settings say overrules the file
        put_bos_first(backend, special["bos_token"])
    elif has_bos and not wants_bos:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return FastTokenizer(backend, _info(directory, settings, ids, adds_bos=bool(wants_bos)))


def _tiktoken(directory: Path, settings: Json, data: bytes) -> FastTokenizer:
    tokenizer = tokenizer_from_tiktoken(data)
    found = _info(directory, settings, {})
    info = replace(
        tokenizer.info,
        chat_template=found.chat_template,
        eos_token_ids=found.eos_token_ids or tokenizer.info.eos_token_ids,
    )
    return FastTokenizer(tokenizer.backend, info)


def _sentencepiece(directory: Path, settings: Json, data: bytes) -> SentencePieceTokenizer:
    processor = processor_of(data)
    added = _added_tokens(directory, settings)
    id_of = {token.text: token_id for token_id, token in added.items()}
    special = _special_tokens(directory, settings)
    ids: dict[str, int] = {}
    for part in PARTS:
        token_id = getattr(processor, part.replace("token", "id"))()
        if part in special:  # what the settings say overrules the model
            text = special[part]
            piece_id = processor.PieceToId(text)
            token_id = id_of.get(text, piece_id if processor.IdToPiece(piece_id) == text else -1)
        if token_id >= 0:
            ids[part] = token_id
            special.setdefault(part, processor.IdToPiece(token_id))
    adds_bos = bool(settings.get("add_bos_token", True)) and "bos_token" in ids
    info = _info(directory, {**settings, **special}, ids, adds_bos=adds_bos)
    return SentencePieceTokenizer(
        data,
        info,
        added=added,
        prefixes_every_part=settings.get("legacy") is not False,
    )


def _info(
    directory: Path, settings: Json, ids: Mapping[str, int], *, adds_bos: bool = True
) -> TokenizerInfo:
    special = _special_tokens(directory, settings)
    return TokenizerInfo(
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=_eos_token_ids(directory, ids.get("eos_token")),
        special_tokens=special,
        adds_bos=adds_bos,
        chat_template=_chat_template(directory, settings, special),
    )


def _eos_token_ids(directory: Path, from_tokenizer: int | None) -> tuple[int, ...]:
    """What generation ends with, as Hugging Face finds it; the tokenizer's own end as a last."""
    for name in (GENERATION_FILE, "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise CheckpointError(
                f"got eos_token_id={value!r} in {directory / name}, wanted an id or a list of ids; "
                "mend the file"
            )
        if ids:
            return tuple(ids)
    return () if from_tokenizer is None else (from_tokenizer,)


def _chat_template(directory: Path, settings: Json, special: Mapping[str, str]) -> str | None:
    own = directory / "chat_template.jinja"
    if own.is_file():
        return _read_text(own)
    template = settings.get("chat_template")
    if template is None:
        template = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name: [{"name": ..., "template": ...}]
        by_name = {each.get("name"): each.get("template") for each in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    if isinstance(template, str):
        return template
    return default_template(
        [*_names(directory), str(_read_json(directory / "config.json").get("_name_or_path", ""))],
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
    )


def _names(directory: Path) -> list[str]:
    """What the directory is called; the Hub's cache says it two levels up."""
    path = directory.resolve()
    return [path.name, path.parent.parent.name] if path.parent.name == "snapshots" else [path.name]


def _special_tokens(directory: Path, settings: Json) -> dict[str, str]:
    """The text of each part that is set; the tokenizer's settings win over the older file."""
    found: dict[str, str] = {}
    for source in (_read_json(directory / "special_tokens_map.json"), settings):
        for part in PARTS:
            value = source.get(part)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                found[part] = text
    return found


def _added_tokens(directory: Path, settings: Json) -> dict[int, AddedToken]:
    older = _read_json(directory / "added_tokens.json")
    found = {token_id: AddedToken(text, True) for text, token_id in older.items()}
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        found[int(token_id)] = AddedToken(token["content"], bool(token.get("special", True)))
    return found


def _read_json(path: Path) -> Json:
    """The object in a file, or nothing where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"got {path} that is no JSON ({error}), wanted a whole file; download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"got {path} with a {type(value).__name__}, wanted an object; download it again"
        )
    return value


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"got {path} that is no UTF-8 ({error}), wanted text; download it again"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"got {path}, wanted a file that can be read ({error.strerror}); check its permissions"
        ) from error
