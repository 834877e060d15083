"""Templates that do too much are refused in time, and what real ones do still works."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage.chat_template import render, render_chat
from jaxpage.errors import RequestError
from jaxpage.sandbox import meter
from jaxpage.tokenizer import ChatPrompt
from jaxpage.tokenizers.default_templates import DefaultTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "h\u00e9llo world"},
    {"role": "assistant", "content": "b\na"},
]
GROWING = "{% set ns = namespace(x=X) %}{% for i in range(60) %}{% set ns.x = Y %}{% endfor %}Z"


def growing(start: str, step: str, use: str) -> str:
    return GROWING.replace("X", start).replace("Y", step).replace("Z", use)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 2**3000000000 }}",
        "{% set x = 10**1000 %}{% for i in range(30) %}{{ x * x * x * x * x * x * x }}{% endfor %}",
        growing("'ab'", "ns.x ~ ns.x", ""),
        growing("'ab'", "ns.x + ns.x", ""),
        growing("'ab'", "ns.x * 2", ""),
        growing("'ab'", "[ns.x, ns.x] | join", ""),
        growing("'ab'", "ns.x.replace('a', ns.x)", ""),
        growing("'ab'", "'%s%s' % (ns.x, ns.x)", ""),
        growing("'ab'", "'{0}{0}'.format(ns.x)", ""),
        growing("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
        growing("(1,)", "(ns.x, ns.x)", "{{ ns.x == ns.x }}"),
        growing("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
        growing("[1]", "ns.x + ns.x", ""),
        pytest.param(growing("[[]]", "ns.x | sum(start=ns.x) + ns.x", ""), marks=pytest.mark.slow),
        "{% set a = namespace() %}{% set a.b = a %}{{ a }}",
        "{{ [namespace()] }}",
        "{{ 'a' * 10**10 }}{{ [1] * 10**10 }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ ('\\t' * 100).expandtabs(10**8) }}",
        "{{ 'a' | center(10**10) }}",
        "{% filter center(10**10) %}a{% endfilter %}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ [1] | batch(10**9, 0) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'a'.join(['b' * 1000000] * 10000) }}",
        "{{ (5).to_bytes(10**10, 'big') }}",
        "{{ ('\u00e9' * 10000).translate({233: 'x' * 1000000}) }}",
        "{% set t = 'x' * 10000000 %}{% for i in range(9999) %}{{ t }}{% endfor %}",
        "{% set x %}{% for i in range(99) %}{{ 'x' * 9**6 }}{% endfor %}{% endset %}{{ x }}",
        "x" * 300_000,
    ],
)  # fmt: skip
def test_what_would_take_too_much_is_refused_before_it_is_made(template: str) -> None:
    with pytest.raises(RequestError, match=r"^got a chat template that .*, wanted one that writes"):
        render(MESSAGES, template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ range(99999) | map('string') | map('length') | select('gt', 9) | list }}",
        "{% for x in range(99999) if x is divisibleby(100000) %}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{{ range(99999) | sum }}",
        "{{ range(99999) | join }}",
    ],
)
def test_steps_and_time_are_counted(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MOST_STEPS", 20_000)
    with pytest.raises(RequestError, match=r"takes more than|recursion"):
        render(MESSAGES, template=template)
    monkeypatch.undo()
    monkeypatch.setattr(meter, "MOST_S", 0.0)
    with pytest.raises(RequestError, match="takes more than 0 s"):
        render(MESSAGES, template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.index('zz') }}",
        "{{ messages[0].content.encode('ascii') }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% break %}",
        "{{ lipsum(n=10**9) }}",
        "{{ '\\ud800' }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% block x %}{{ self.x() }}{% endblock %}",
        "{% import 'x' as y %}",
        "{{ 10.0 ** 400 }}",
        "{{ strftime_now('%' * 5000) }}",
        "{{ raise_exception() }}",
        "{{ range(10**9) }}",
        "{{ messages[0].pop('role') }}",
        "{{ {}.x.y }}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(template: str) -> None:
    with pytest.raises(RequestError, match=r"^got messages that the model's chat template refuses"):
        render(MESSAGES, template=template)


@pytest.mark.torch
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | map(attribute='content') | join(', ') }}",
        "{{ messages | join('|', attribute='role') }}",
        "{{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }}{{ [[1], [2]] | sum(start=[]) }}",
        "{{ messages | tojson(indent=2, sort_keys=true) }}{{ 'é<' | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
        "{% for m in [] %}x{% else %}none{% endfor %}{% for a, b in [(1, 2)] %}{{ a }}{% endfor %}",
        "{{ 'a-b-c' | replace('-', '+', 1) }}{{ 'aXb'.replace('X', '') }}{{ 'ab' | list }}",
        "{{ '%-5s|%03d' % ('a', 7) }}{{ '{:>4}{x}'.format(1, x=2) }}{{ 'x' | center(5) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ messages[::-1][0].role }}{{ messages[1:] | length }}",
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}"
        "{% call f(1, 3, 4, c=5) %}in{% endcall %}",
        "{{ messages | groupby('role') | list }}{{ [3, 1, 3] | unique | sort | list }}",
        "{{ messages[0].items() | list }}{{ dict(a=1) | dictsort }}{{ 2**10 }}{{ -7 % 3 }}",
        "{{ 'a b'.split() }}{{ ', '.join(['a', 'b']) }}{{ 'a\nb' | indent(2, true) }}",
        "{% if messages[0].content is string and 'h' in messages[0].content %}y{% endif %}",
        "{% for m in messages recursive %}{{ m.role if m is mapping else m }}"
        "{{ loop(m.values()) if m is mapping }}{% endfor %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | first | length }}",
        "{% filter upper %}{{ 'x' ~ 1 ~ none ~ [1] }}{% endfilter %}{{ (1, 'a') }}{{ {1: [2]} }}",
    ],
)  # fmt: skip
def test_what_templates_do_gives_the_text_of_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (theirs,), _ = render_jinja_template(conversations=[MESSAGES], chat_template=template)
    assert render(MESSAGES, template=template, add_generation_prompt=False) == theirs


def test_a_long_conversation_is_within_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 400}] * 500  # 1 MB
    grows = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.content %}"
        "{% endfor %}{{ ns.s }}"
    )
    assert len(render(messages, template=grows)) == 500 * 2000


def test_a_default_template_is_said_to_be_one() -> None:
    class Base:
        chat_template = DefaultTemplate("{{ messages[0].content }}")
        bos_token = eos_token = ""

    with pytest.warns(UserWarning, match="brings no chat template, so LLaMA-2's is used"):
        text = render_chat(MESSAGES, Base())
    assert type(text) is ChatPrompt and type(text + "") is str


def test_what_is_not_set_is_undefined() -> None:
    template = "{{ bos_token is defined }}{{ pad_token is defined }}{{ pad_token }}"
    assert render(MESSAGES, template=template, pad_token="<p>") == "FalseTrue<p>"
