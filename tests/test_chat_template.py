"""Conversations as text: the sandbox, the defaults, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxpage.chat_template import render, render_chat
from jaxpage.errors import RequestError
from jaxpage.tokenizer import load_tokenizer
from jaxpage.tokenizers.default_templates import LLAMA2_TEMPLATE, VICUNA_TEMPLATE, default_template
from tests.tokenizers.kinds import sentencepiece_model, tiktoken_file, write_files

USER = {"role": "user", "content": " Hi "}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass
class Chat:
    """What a template needs of a tokenizer."""

    chat_template: str | None = None
    bos_token: str = "<s>"
    eos_token: str = "</s>"


def test_vicuna() -> None:
    assert render_chat([SYSTEM, *TURNS], Chat(VICUNA_TEMPLATE)) == (
        "<s>Be kind. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    )
    assert render_chat([USER], Chat(VICUNA_TEMPLATE)) == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:"
    )


def test_llama2() -> None:
    assert render_chat([SYSTEM, *TURNS], Chat(LLAMA2_TEMPLATE)) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
    )
    assert render_chat([USER], Chat(LLAMA2_TEMPLATE)) == "<s>[INST] Hi [/INST]"


@pytest.mark.parametrize("template", [VICUNA_TEMPLATE, LLAMA2_TEMPLATE])
@pytest.mark.parametrize("messages", [[SYSTEM], [TURNS[1]], [USER, USER], [USER, SYSTEM]])
def test_the_defaults_want_turns(template: str, messages: list[dict[str, str]]) -> None:
    with pytest.raises(RequestError, match="user"):
        render_chat(messages, Chat(template))


@pytest.mark.parametrize(
    ("names", "bos", "eos", "wanted"),
    [
        (["models/Vicuna-13B"], "<s>", "</s>", VICUNA_TEMPLATE),
        (["tiny"], "<s>", "</s>", LLAMA2_TEMPLATE),
        ([], "<s>", "</s>", LLAMA2_TEMPLATE),
        (["tiny"], "<|begin_of_text|>", "<|end_of_text|>", None),
        (["tiny"], "", "", None),
    ],
)
def test_models_without_a_template(
    names: list[str], bos: str, eos: str, wanted: str | None
) -> None:
    assert default_template(names, bos_token=bos, eos_token=eos) == wanted


def test_no_template_is_said_so() -> None:
    with pytest.raises(RequestError, match="a model without a chat template, wanted a chat model"):
        render_chat([USER], Chat(None))
    assert render_chat([USER], Chat(None), template="{{ messages[0].role }}") == "user"


@pytest.mark.parametrize(
    ("tokenizer_files", "template"),
    [
        ({"tokenizer.model": sentencepiece_model()}, LLAMA2_TEMPLATE),
        ({"tokenizer.model": sentencepiece_model()}, "{{ bos_token }}{{ messages[0]['content'] }}"),
        ({"tokenizer.model": tiktoken_file()}, LLAMA3_TEMPLATE),
    ],
)
def test_a_rendered_chat_has_one_bos(
    tmp_path: Path, tokenizer_files: dict[str, bytes | str], template: str
) -> None:
    tokenizer = load_tokenizer(write_files(tmp_path, tokenizer_files))
    text = render_chat([USER], tokenizer, template=template)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(ids[0]) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "got no messages, wanted at least one"),
        ("hi", "got messages that are str, wanted a list"),
        (USER, "wrap a single message in a list"),
        (["hi"], "got messages[0]='hi', wanted"),
        ([USER, {"content": "x"}], "got messages[1] with role None"),
        ([{"role": "", "content": "x"}], "with role ''"),
        ([{"role": "user"}], "got messages[0] with content None, wanted text"),
        ([{"role": "user", "content": 3}], "with content 3"),
        ([{"role": "user", "content": []}], "with content []"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "wanted text"),
        ([{"role": "user", "content": ["x"]}], "wanted text"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(messages, template="x")
    assert message in str(caught.value)


def test_parts_of_text_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = "{{ messages[0]['content'] }}"
    assert render([{"role": "user", "content": parts}], template=template) == "one\ntwo"


def test_messages_are_not_changed_and_keep_their_other_keys() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Bo"}
    assert render([message], template="{{ messages[0].name }}") == "Bo"
    assert message["content"] == [{"type": "text", "text": "a"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render([calls], template="{{ messages[0].tool_calls[0].name }}") == "f"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if true %}\n  {% set x = 1 %}\nx{{ x }}\n{% endif %}\n", "x1\n"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}",
         '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}"
         "{% endfor %}", "user"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ tools is none }} {{ documents is none }} {{ extra }}", "True True 5"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "3"),
    ],
)  # fmt: skip
def test_templates_have_what_they_are_written_for(template: str, wanted: str) -> None:
    assert render(TURNS, template=template, variables={"extra": 5}) == wanted


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "is no jinja2 (line 1"),
        ("{{ raise_exception('only Latin') }}", "refuses (only Latin)"),
        ("{{ nothing.there }}", "refuses ('nothing' is undefined)"),
        ("{{ messages[0]['content'] + 1 }}", "refuses ("),
        ("{{ 1 / 0 }}", "refuses ("),
        ("{{ ''.__class__.__mro__ }}", "refuses ("),
        ("{{ messages.append(1) }}", "refuses ("),
        ("{{ render.__globals__ }}", "refuses ("),
        ("{% for i in range(99999999) %}{% endfor %}", "refuses ("),
        ("{% include '/etc/hostname' %}", "refuses ("),
        ("{{ raise_exception('two\\nlines') }}", "refuses (two lines)"),
        ("{% " + "set" * 9999 + " %}", "is no jinja2 (line 1"),
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(template: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render([USER], template=template)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.torch
@pytest.mark.parametrize(
    "template", [VICUNA_TEMPLATE, LLAMA2_TEMPLATE, LLAMA3_TEMPLATE, "{{ messages | tojson }}"]
)
@pytest.mark.parametrize("messages", [TURNS, [SYSTEM, *TURNS], [USER]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_transformers_renders_the_same(
    template: str, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **tokens,
    )
    ours = render(
        messages, template=template, add_generation_prompt=add_generation_prompt, **tokens
    )
    assert ours == theirs
