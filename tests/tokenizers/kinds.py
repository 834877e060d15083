"""A small tokenizer of each kind, trained or written on the spot, and text that is hard on them."""

from __future__ import annotations

import base64
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from jaxpage.tokenizers import byte_level
from jaxpage.tokenizers.sentencepiece_proto import CONTROL, NORMAL, read_model_proto

SENTENCE = "the cat sat on a mat while 12 dogs ran over hills don't 345 naïve café I'll 日本 x"
HARD_TEXTS = (
    "",
    " ",
    "Hello world",
    "  two  spaces   three    ",
    "\n\nlines\r\n\t tab\n",
    "1234567 and 12,345.67",
    "naïve café, ½ Ⅷ ﬁ ạ́",
    "I'LL don't it's",
    "日本語 한국어 مرحبا",
    "emoji 😀 👩‍👩‍👧 🏳️‍🌈",
    "\u00a0no break\u2003em\u200bzero",
    "def f(x):\n    return x**2  # ok",
    " " * 21 + "x" + "\n" * 7,
    "a" * 40,
    "\ufffd\x00\x7f",
)
CHAT_SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")


@cache
def sentences() -> tuple[str, ...]:
    draw, words = random.Random(0), SENTENCE.split()
    return tuple(
        " ".join(draw.choice(words) for _ in range(draw.randrange(3, 12))) + draw.choice(".!\n")
        for _ in range(400)
    )


@cache
def sentencepiece_model(**options: Any) -> bytes:
    """A model as LLaMA's: BPE, bytes for what is missing, text left as it is."""
    out = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 380,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_writer=out, **(settings | options)
    )
    return out.getvalue()


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE whose digits stand alone, with chat tokens as ids 0, 1 and 2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(CHAT_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences(), trainer)
    return backend


def tiktoken_file() -> bytes:
    """A file as Llama 3's, from the vocabulary of the byte-level tokenizer."""
    backend = byte_level_backend()
    tokens = sorted(range(len(CHAT_SPECIALS), backend.get_vocab_size()))
    lines = []
    for rank, token_id in enumerate(tokens):
        token = backend.id_to_token(token_id)
        assert token is not None
        lines.append(base64.b64encode(byte_level.to_bytes(token)) + f" {rank}\n".encode())
    return b"".join(lines)


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file with metadata alone; `keys` are those of the tokenizer, without prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_keys(**changes: Any) -> dict[str, Any]:
    backend = byte_level_backend()
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [CONTROL if token in CHAT_SPECIALS else NORMAL for token in tokens],
        "merges": [" ".join(pair) for pair in state["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def sentencepiece_keys(model: bytes | None = None, **changes: Any) -> dict[str, Any]:
    texts, scores, types = zip(
        *read_model_proto(model or sentencepiece_model()).pieces, strict=True
    )
    keys = {
        "model": "llama",
        "tokens": list(texts),
        "scores": list(scores),
        "token_type": list(types),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def write_files(directory: Path, files: dict[str, bytes | str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (directory / name).write_bytes(data)
    return directory


KINDS = (
    "gguf byte-level",
    "gguf sentencepiece",
    "tokenizer.json",
    "sentencepiece",
    "sentencepiece as json",
    "tiktoken",
)


def make(kind: str, directory: Path) -> Tokenizer:
    """A tokenizer of one of KINDS, loaded from its files in `directory`."""
    if kind == "gguf byte-level":
        return load_tokenizer(write_gguf(directory / "a.gguf", byte_level_keys()))
    if kind == "gguf sentencepiece":
        return load_tokenizer(write_gguf(directory / "b.gguf", sentencepiece_keys()))
    if kind == "sentencepiece as json":
        save_tokenizer(make("sentencepiece", directory), directory / kind)
        return load_tokenizer(directory / kind)
    files: dict[str, bytes | str] = {
        "tokenizer.json": {"tokenizer.json": byte_level_backend().to_str()},
        "sentencepiece": {"tokenizer.model": sentencepiece_model()},
        "tiktoken": {"tokenizer.model": tiktoken_file()},
    }[kind]
    return load_tokenizer(write_files(directory / kind, files))
