"""A tokenizer as files in Hugging Face's form, which `transformers.AutoTokenizer` reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.fast import FastTokenizer
from jaxpage.tokenizers.hf_directory import FAST_FILE, MODEL_FILE
from jaxpage.tokenizers.hf_settings import CONFIG_FILE, GENERATION_FILE
from jaxpage.tokenizers.sentencepiece_as_json import try_backend
from jaxpage.tokenizers.sentencepiece_kind import SentencePieceTokenizer


def write_tokenizer(tokenizer: FastTokenizer | SentencePieceTokenizer, directory: Path) -> None:
    """Writes the files of `tokenizer` into `directory`, which is made where it is missing.

    The ids that end a text go to generation_config.json, unless there is one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(tokenizer, FastTokenizer):
        backend = tokenizer.backend
    else:
        (directory / MODEL_FILE).write_bytes(tokenizer.model)
        backend = try_backend(tokenizer)
    if backend is not None:
        backend.save(str(directory / FAST_FILE), pretty=False)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        (directory / FAST_FILE).unlink(
            missing_ok=True
        )  # it would be read in place of tokenizer.model
        settings = _sentencepiece_settings(tokenizer)
    _write_json(directory / CONFIG_FILE, {**settings, **_common_settings(tokenizer.info)})
    generation = directory / GENERATION_FILE
    if not generation.exists() and tokenizer.eos_token_ids:
        ends = list(tokenizer.eos_token_ids)
        _write_json(
            generation,
            {
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": ends if len(ends) > 1 else ends[0],
            },
        )


def _common_settings(info: TokenizerInfo) -> dict[str, Any]:
    template = {} if info.chat_template is None else {"chat_template": info.chat_template}
    extra = list(info.additional_special_tokens)
    return {
        **info.special_tokens,
        **({"additional_special_tokens": extra} if extra else {}),
        "add_bos_token": info.adds_bos,
        "clean_up_tokenization_spaces": False,
        **template,
    }


def _sentencepiece_settings(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": tokenizer.prefixes_every_part,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(token_id): {
                "content": token.content,
                "special": token.special,
                "normalized": False,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
            }
            for token_id, token in tokenizer.named_tokens().items()
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
