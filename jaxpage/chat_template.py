"""A conversation as the text that a model was trained on.

Templates come with models, so they are untrusted code: they run in a sandbox, where they see
messages and special tokens but can't change them, and where time and memory are bounded. The
environment is that of Hugging Face's `apply_chat_template`, for which templates are written.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from jaxpage.errors import RequestError
from jaxpage.reading import answering, reason
from jaxpage.sandbox.environment import BoundedSandbox
from jaxpage.sandbox.meter import metered
from jaxpage.tokenizers.base import ChatPrompt
from jaxpage.tokenizers.default_templates import DefaultTemplate

Message = Mapping[str, Any]


class ChatTokenizer(Protocol):
    """What a template needs of a tokenizer; it may also have `special_tokens`, role to text."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def bos_token(self) -> str: ...

    @property
    def eos_token(self) -> str: ...


def render_chat(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The whole prompt that the tokenizer's template, or `template`, makes of a conversation.

    Encoding adds nothing to it: the template writes BOS where the model wants one. `variables`:
    further names that the template may read, such as `tools`. Warns when the model has no template
    of its own and a default is used. Raises RequestError.
    """
    template = template or tokenizer.chat_template
    if template is None:
        raise RequestError(
            "got messages for a model without a chat template, wanted a chat model; "
            "pass template=, or write the prompt as text"
        )
    if isinstance(template, DefaultTemplate):
        warnings.warn(
            f"the model brings no chat template, so {template.origin} is used, which it may not "
            "know; pass template=, or write the prompt as text",
            stacklevel=2,
        )
    return render(
        messages,
        template=template,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
        **_special_tokens(tokenizer),
    )


def render(
    messages: Sequence[Message],
    *,
    template: str,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    **special_tokens: Any,
) -> ChatPrompt:
    """The prompt that `template` (jinja2) makes of `messages`; RequestError when it fails.

    `special_tokens`: the texts of bos_token, eos_token and so on; others are undefined in it.
    """
    seen = {
        **special_tokens,
        "tools": None,
        "documents": None,
        **(variables or {}),
        "messages": _checked(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    with answering(_REFUSED, wanted=_WANTED, do=_DO), metered():
        try:
            text = _compiled(template).render(seen)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"got a chat template that is no jinja2 (line {error.lineno}: "
                f"{_line(error.message)}), wanted one that can be read; pass template= or mend "
                "the model's files"
            ) from error
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
            message = _line(str(error)) or reason(error)
            raise RequestError(f"got {_REFUSED} ({message}), wanted {_WANTED}; {_DO}") from error
        text.encode()  # half a surrogate pair is no text
    return ChatPrompt(text)


def _line(text: str | None) -> str:
    """A message of jinja2 or of a template as one line of at most 500 characters."""
    return " ".join((text or "").split())[:500]


_REFUSED = "messages that the model's chat template refuses"
_WANTED = "roles and contents that it knows"
_DO = "change the messages"


def _special_tokens(tokenizer: ChatTokenizer) -> Mapping[str, Any]:
    """The special tokens that templates see, by name; one that is not set is left out."""
    found = getattr(tokenizer, "special_tokens", None)
    if isinstance(found, Mapping):
        return found
    both = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return {part: text for part, text in both.items() if text}


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"got messages that are {type(messages).__name__}, wanted a list of "
            '{"role": ..., "content": ...}; wrap a single message in a list'
        )
    if not messages:
        raise RequestError("got no messages, wanted at least one; add a user message")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(
            f'got {where}={message!r}, wanted {{"role": ..., "content": ...}}; change it'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"got {where} with role {role!r}, wanted 'system', 'user' or 'assistant'; set its role"
        )
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return dict(message)
    return {**message, "content": _text(where, content)}


def _text(where: str, content: object) -> str:
    """Content as one string; parts of text (`[{"type": "text", "text": ...}]`) become lines."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"got {where} with content {content!r}, wanted text; pass a string as content"
        )
    return "\n".join(map(str, texts))


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    if len(layout) > 1000:
        raise jinja2.TemplateError(f"a date's layout has {len(layout)} characters")
    return datetime.now().strftime(layout)
