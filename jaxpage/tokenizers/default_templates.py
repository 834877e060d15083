"""Chat templates for models that bring none: which one, by a model's names and special tokens."""

from __future__ import annotations

from collections.abc import Iterable

VICUNA_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'].strip() -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = "A chat between a curious user and an artificial intelligence assistant. "
        ~ "The assistant gives helpful, detailed, and polite answers to the user's questions." -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- if not turns -%}{{- raise_exception('a user message is wanted') -}}{%- endif -%}
{{- bos_token ~ system ~ ' ' -}}
{%- for turn in turns -%}
    {%- if turn['role'] != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception('user and assistant must take turns, the user first') -}}
    {%- elif turn['role'] == 'user' -%}
        {{- 'USER: ' ~ turn['content'].strip() ~ ' ' -}}
    {%- else -%}
        {{- 'ASSISTANT: ' ~ turn['content'].strip() ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
"""Source: the conversation `vicuna_v1.1` of FastChat."""

LLAMA2_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = '<<SYS>>\\n' ~ messages[0]['content'].strip() ~ '\\n<</SYS>>\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- if not turns -%}{{- raise_exception('a user message is wanted') -}}{%- endif -%}
{%- for turn in turns -%}
    {%- if turn['role'] != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception('user and assistant must take turns, the user first') -}}
    {%- elif turn['role'] == 'user' -%}
        {%- set text = (system if loop.first else '') ~ turn['content'].strip() -%}
        {{- bos_token ~ '[INST] ' ~ text ~ ' [/INST]' -}}
    {%- else -%}
        {{- ' ' ~ turn['content'].strip() ~ ' ' ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
"""Source: `chat_completion` of Meta's llama repository, `llama/generation.py`."""


class DefaultTemplate(str):
    """A default template, for a model without one of its own."""

    __slots__ = ()

    @property
    def origin(self) -> str:
        """The models it was written for, as in "Vicuna's"."""
        return "Vicuna's" if self == VICUNA_TEMPLATE else "LLaMA-2's"


def default_template(
    names: Iterable[str], *, bos_token: str, eos_token: str
) -> DefaultTemplate | None:
    """The template for a model that brings none, by what it is called and its special tokens.

    "vicuna" in a name: Vicuna's. Otherwise a model with LLaMA's "<s>" and "</s>": LLaMA-2's, as
    Hugging Face did while it had defaults. Otherwise None: a wrong template is worse than none.
    """
    if any("vicuna" in name.lower() for name in names):
        return DefaultTemplate(VICUNA_TEMPLATE)
    has_tokens = (bos_token, eos_token) == ("<s>", "</s>")
    return DefaultTemplate(LLAMA2_TEMPLATE) if has_tokens else None
