"""Tokenizers and chat templates under attack: loaded, and then used as a request uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxpage.chat_template import render_chat
from jaxpage.tokenizer import Tokenizer, load_tokenizer
from jaxpage.tokenizers.default_templates import LLAMA2_TEMPLATE, VICUNA_TEMPLATE
from tests.fuzz.target import Target
from tests.tokenizers.kinds import (
    byte_level_backend,
    byte_level_keys,
    sentencepiece_keys,
    sentencepiece_model,
    tiktoken_file,
    write_files,
    write_gguf,
)

TEXT = "Hello <s>world</s>  12,345 naïve 日本 😀\n\t<|im_end|> the cat sat on a mat" * 4
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "the cat 日本"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "on a mat"},
]
CHATML = """\
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- set ns = namespace(last=-1, text='') -%}
{%- for m in messages[::-1] if m.role == 'user' -%}
    {%- if loop.first %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- macro turn(m, times=1) -%}
    {{- ('<|im_start|>' ~ m.role + '\\n' + m['content'].strip().split('</think>')[-1]) * times -}}
{%- endmacro -%}
{%- for m in messages -%}
    {%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no') }}{% endif -%}
    {{- turn(m) | replace('\\n\\n', '\\n') | indent(2) ~ '<|im_end|>\\n' -}}
    {%- if loop.index > 50 %}{% break %}{% endif -%}
{%- endfor -%}
{{- '%s %5d' % ([1, 2] | join(', '), 3) }}{{ '{:>5}'.format('ab') | center(9) -}}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def byte_fallback_json(*, metaspace: bool) -> str:
    """A tokenizer.json as LLaMA's, or with the other way to mark spaces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("a", "t"), ("c", "at")]
    for text in [*"\u2581thecas", *("".join(pair) for pair in merges)]:
        vocab.setdefault(text, len(vocab))
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace()
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    return backend.to_str()


SETTINGS = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": True, "normalized": False},
    "pad_token": None,
    "image_token": "<image>",
    "additional_special_tokens": ["<|turn|>", {"content": "<tool>", "single_word": True}],
    "added_tokens_decoder": {
        "420": {"content": "<|turn|>", "special": True, "lstrip": True},
        "421": {"content": "<tool>", "special": False, "normalized": True},
    },
    "add_bos_token": True,
    "add_prefix_space": None,
    "legacy": False,
    "chat_template": [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ],
}
BESIDE: dict[str, bytes | str] = {
    "tokenizer_config.json": json.dumps(SETTINGS, indent=1),
    "special_tokens_map.json": json.dumps({"unk_token": "<unk>", "sep_token": {"content": "[S]"}}),
    "added_tokens.json": json.dumps({"<|extra|>": 422, "[S]": 423}),
    "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}),
    "config.json": json.dumps({"eos_token_id": 2, "_name_or_path": "lmsys/vicuna-7b"}),
    "chat_template.json": json.dumps({"chat_template": CHATML}),
}


def use(path: Path) -> Tokenizer:
    """Loads a tokenizer and does with it what requests do."""
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    some = [*ids[:300], *range(min(tokenizer.vocab_size, 300)), tokenizer.vocab_size, 2**31]
    for skip in (True, False):
        stream = tokenizer.stream(skip_special_tokens=skip)
        shown = "".join(stream.push(token_id) for token_id in some) + stream.pending
        assert shown == tokenizer.decode(some, skip_special_tokens=skip)
    return tokenizer


def chat(path: Path) -> object:
    """Also renders a conversation, where there is a template, and encodes it."""
    tokenizer = use(path)
    if tokenizer.chat_template is None:
        return None
    return tokenizer.encode(render_chat(CHAT, tokenizer))


def _files(files: dict[str, bytes | str]) -> Callable[[Path], Path]:
    return lambda directory: write_files(directory, files)


def _target(name: str, files: dict[str, bytes | str], *mutated: str) -> Target:
    return Target(f"tokenizers.{name}", _files(files), chat, mutated)


def _with_template(text: str) -> dict[str, bytes | str]:
    return {"tokenizer.json": byte_level_backend().to_str(), "chat_template.jinja": text}


_JSON, _MODEL, _TEMPLATE = "tokenizer.json", "tokenizer.model", "chat_template.jinja"

TARGETS: tuple[Target, ...] = (
    _target("byte_level", {_JSON: byte_level_backend().to_str()}, _JSON),
    _target("byte_fallback", {_JSON: byte_fallback_json(metaspace=False)}, _JSON),
    _target("metaspace", {_JSON: byte_fallback_json(metaspace=True)}, _JSON),
    _target("sentencepiece", {_MODEL: sentencepiece_model()}, _MODEL),
    _target("tiktoken", {_MODEL: tiktoken_file()}, _MODEL),
    _target("beside_json", {_JSON: byte_level_backend().to_str(), **BESIDE}, *BESIDE),
    _target("beside_sentencepiece", {_MODEL: sentencepiece_model(), **BESIDE}, *BESIDE),
    _target("beside_tiktoken", {_MODEL: tiktoken_file(), **BESIDE}, *BESIDE),
    Target(
        "tokenizers.gguf_byte_level",
        lambda directory: write_gguf(directory / "a.gguf", byte_level_keys()),
        chat,
        ("a.gguf",),
    ),
    Target(
        "tokenizers.gguf_sentencepiece",
        lambda directory: write_gguf(directory / "a.gguf", sentencepiece_keys()),
        chat,
        ("a.gguf",),
    ),
    _target("template_chatml", _with_template(CHATML), _TEMPLATE),
    _target("template_llama2", _with_template(LLAMA2_TEMPLATE), _TEMPLATE),
    _target("template_vicuna", _with_template(VICUNA_TEMPLATE), _TEMPLATE),
)
