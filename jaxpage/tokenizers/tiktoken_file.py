"""Llama 3's `tokenizer.model`: a line a token, its bytes in base64 and its rank.

The file holds no special tokens and no rule to cut text: both belong to Llama 3 itself.
Source: `tokenizer.py` of Meta's llama-models repository.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxpage.errors import CheckpointError
from jaxpage.reading import reading
from jaxpage.tokenizers.base import TokenizerInfo
from jaxpage.tokenizers.byte_level import to_chars
from jaxpage.tokenizers.ends import all_ends
from jaxpage.tokenizers.fast import FastTokenizer, put_bos_first
from jaxpage.tokenizers.pretokenizers import pre_tokenizer

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
NUM_SPECIAL = 256
_LONGEST = 1024
"""Bytes of a token: each way to cut it is looked at. Llama 3's longest has 128."""
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


def tokenizer_from_tiktoken(
    data: bytes,
    *,
    chat_template: str | None = None,
    names: Mapping[int, str] | None = None,
) -> FastTokenizer:
    """Llama 3's tokenizer from the content of its file; CheckpointError when it is damaged.

    `names`: what files beside it call special tokens, by id, where it is otherwise than in 3.1.
    """
    with reading("tokenizer.model", "a tiktoken model of Llama 3"):
        ranks = _ranks(data)
    special = _special_tokens(len(ranks), names or {})
    rule = pre_tokenizer("llama-bpe")
    chars = {to_chars(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(
        models.BPE(vocab=chars, merges=_merges(chars), ignore_merges=rule.takes_whole_words)
    )
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    ids = {name: len(ranks) + index for index, name in enumerate(special)}
    parts = {"bos_token": special[0], "eos_token": special[1]}
    put_bos_first(backend, parts["bos_token"])
    return FastTokenizer(
        backend,
        TokenizerInfo(
            bos_token_id=ids[parts["bos_token"]],
            eos_token_ids=all_ends([ids[parts["eos_token"]]], ids),
            special_tokens=parts,
            adds_bos=True,
            chat_template=chat_template,
        ),
    )


def _special_tokens(first: int, names: Mapping[int, str]) -> list[str]:
    """The names of the special ids: those given, else those of 3.1, each once."""
    given = set(names.values())
    return [
        names.get(first + index, f"<|unnamed_special_token_{index}|>" if name in given else name)
        for index, name in enumerate(SPECIAL_TOKENS)
    ]


def _ranks(data: bytes) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise _damaged(str(error)) from error
    longest = max(map(len, ranks), default=0)
    if longest > _LONGEST:
        raise _damaged(f"it has a token of {longest} bytes, where {_LONGEST} are many")
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
