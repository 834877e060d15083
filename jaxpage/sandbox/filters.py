"""jinja2's filters, each a step that weighs what it is given and what it makes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any

from jinja2.runtime import Context
from jinja2.utils import pass_context

from jaxpage.sandbox.checks import MOST_COUNT, check_format, check_replace
from jaxpage.sandbox.meter import CONTAINERS, check_size, meter, refuse, steps

_LITTLE = 1 << 20
_SLOW = frozenset({"pprint", "striptags", "urlize", "wordcount", "wordwrap", "xmlattr"})
_COUNTED = frozenset({"batch", "slice", "indent", "tojson", "wordwrap", "truncate"})


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step; its arguments and its result are weighed."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        of_now = meter()
        of_now.step()
        given = (*args, *kwargs.values())
        weight = of_now.weigh(*given)
        numbers = [abs(each) for each in given if isinstance(each, int)]
        if name in _COUNTED and max(numbers, default=0) > MOST_COUNT:
            refuse(f"counts to {max(numbers)} in {name}")
        if name == "center":
            check_size(max(numbers, default=0))
        if name == "indent" and args:
            step = max([*numbers, *(len(each) for each in given[1:] if isinstance(each, str)), 4])
            check_size(weight + str(args[0]).count("\n") * step)
        if name == "format" and args:
            check_format(of_now, str(args[0]), "%", (*args[1:], *kwargs.values()))
        if name in _SLOW and weight > _LITTLE // (1 + len(given) * (len(given) > 2)):
            refuse(f"gives {name} more than {_LITTLE} characters")
        result = function(*args, **kwargs)
        return steps(result) if isinstance(result, GeneratorType) else of_now.made(result)

    return wrapped


def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that counts as a step."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        meter().step()
        return function(*args, **kwargs)

    return wrapped


@pass_context  # so that it is never tried while compiling
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    return steps(values)


def _list(value: Iterable[Any]) -> list[Any]:
    if isinstance(value, (str, bytes)) and len(value) > _LITTLE:
        refuse(f"cuts a text of {len(value)} characters")
    return list(value if isinstance(value, CONTAINERS) else steps(value))


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    value = _attributes(context, value, attribute)
    parts, of_now = list(steps(value)), meter()
    check_size(of_now.weigh(*parts) + len(str(d)) * len(parts))
    return str(d).join(map(str, parts))


@pass_context
def _sum(context: Context, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    environment: Any = context.environment
    for each in steps(_attributes(context, iterable, attribute)):
        start = environment.call_binop(context, "+", start, each)
    return start


def _attributes(context: Context, values: Iterable[Any], attribute: Any) -> Iterable[Any]:
    if attribute is None:
        return values
    named = {"attribute": attribute}
    return context.environment.call_filter("map", values, kwargs=named, context=context)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    check_replace(str(s), str(old), str(new))
    return str(s).replace(str(old), str(new), -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes it for HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts, size = [], 0
    for part in steps(encoder.iterencode(value)):
        parts.append(part)
        size += len(part)
        check_size(size)
    return "".join(parts)


OWN: dict[str, Callable[..., Any]] = {
    "counted": _counted,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "sum": _sum,
    "tojson": _to_json,
}
"""In place of jinja2's, which make first and can't be weighed; `counted` is what loops run over."""
