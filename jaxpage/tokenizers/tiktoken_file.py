"""Llama 3's `tokenizer.model`: a line a token, its bytes in base64 and its rank.

The file holds no special tokens and no rule to cut text: both belong to Llama 3 itself.
Source: `tokenizer.py` of Meta's llama-models repository.
"""

from __future__ import annotations

import base64
import binascii
import re

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxpage.errors import CheckpointError
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.byte_level import to_chars
from jaxpage.tokenizers.fast import FastTokenizer, put_bos_first
from jaxpage.tokenizers.pretokenizers import pre_tokenizer

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
NUM_SPECIAL = 256
_NAMED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
SPECIAL_TOKENS = (
    *_NAMED,
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 2 + NUM_SPECIAL - len(_NAMED))),
)
"""In the order of their ids, which follow the last rank. Names are those of 3.1 and later; in 3.0
some of them were "reserved", and unused."""


def is_tiktoken(data: bytes) -> bool:
    """Whether a `tokenizer.model` is of this kind and not sentencepiece's."""
    return _FIRST_LINE.match(data) is not None


def tokenizer_from_tiktoken(data: bytes, *, chat_template: str | None = None) -> FastTokenizer:
    """Llama 3's tokenizer from the content of its file; CheckpointError when it is damaged."""
    ranks = _ranks(data)
    rule = pre_tokenizer("llama-bpe")
    chars = {to_chars(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(
        models.BPE(vocab=chars, merges=_merges(chars), ignore_merges=rule.takes_whole_words)
    )
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    put_bos_first(backend, SPECIAL_TOKENS[0])
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return FastTokenizer(
        backend,
        TokenizerInfo(
            bos_token_id=len(ranks),
            eos_token_ids=tuple(len(ranks) + SPECIAL_TOKENS.index(end) for end in ends),
            special_tokens={"bos_token": SPECIAL_TOKENS[0], "eos_token": "<|end_of_text|>"},
            adds_bos=True,
            chat_template=chat_template,
        ),
    )


def _ranks(data: bytes) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise _damaged(str(error)) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _damaged("its ranks are not 0, 1, 2, ...")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise _damaged(f"it lacks the bytes {missing[:8]}")
    return ranks


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"got a damaged tiktoken tokenizer.model ({what}), wanted a line for each token; "
        "download it again"
    )


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs that may be merged, first the one whose result has the lowest rank.

    tiktoken merges any two neighbours that make a token, so every way to cut a token in two
    tokens is a merge.
    """
    ordered = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    return [
        (token[:cut], token[cut:])
        for token in ordered
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
