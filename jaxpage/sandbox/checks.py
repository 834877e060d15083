"""How much an operator or a method of Python's own is about to make, before it makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxpage.sandbox.meter import MOST_BITS, Meter, check_bits, check_size, refuse, steps

MOST_COUNT = 100_000
_MOST_PARTS = 1 << 22
"""Characters of a text that is cut into pieces, each of which is an object."""
_LONG_NUMBER = re.compile(r"[0-9]{6}")


def check_operation(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Weighs what an operator is about to make."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MOST_BITS:
            refuse(f"makes numbers of more than {MOST_BITS} bits")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(many, (str, bytes, list, tuple)):
                check_size(meter.weigh(many) * times)
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() + right.bit_length())
    elif operator == "+" and isinstance(left, (str, bytes, list, tuple)):
        meter.weigh(left, right)
    elif operator == "%" and isinstance(left, (str, bytes)):
        values = tuple(right.values()) if isinstance(right, Mapping) else right
        text = left if isinstance(left, str) else left.decode("latin-1")
        check_format(meter, text, "%", values if isinstance(values, tuple) else (values,))


def check_format(meter: Meter, text: str, mark: str, values: tuple[Any, ...]) -> None:
    """Weighs what a format is about to make; `mark` begins each of its fields."""
    stars = "*" in text and any(isinstance(each, int) and abs(each) > 999 for each in values)
    if _LONG_NUMBER.search(text) or (mark == "%" and stars):
        refuse("formats with a width of more than 99999")
    widths = text.count(mark) * MOST_COUNT if re.search(r"[0-9]{3}", text) else 0
    check_size(len(text) + text.count(mark) * meter.weigh(*values) + widths)


def check_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Weighs what a method of a text or number is about to make; its arguments."""
    numbers = [abs(each) for each in (*args, *kwargs.values()) if isinstance(each, int)]
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        check_size(max(numbers, default=0))
    if isinstance(owner, int):
        return args
    if name == "expandtabs":
        tab = "\t" if isinstance(owner, str) else b"\t"
        check_size(len(owner) + owner.count(tab) * max(numbers, default=8))  # type: ignore[arg-type]  # of one type
    elif name == "replace" and len(args) > 1:
        check_replace(owner, args[0], args[1])
    elif name in ("split", "rsplit", "splitlines") and len(owner) > _MOST_PARTS:
        refuse(f"cuts a text of {len(owner)} characters")
    elif name == "translate":
        check_size(len(owner) * (1 + meter.weigh(*args)) if len(owner) > 1024 else 0)
    elif name == "join" and args:
        parts = meter.made(list(steps(args[0])))
        check_size(meter.weigh(*parts) + len(owner) * len(parts))
        return (parts, *args[1:])
    return args


def check_replace(text: Any, old: Any, new: Any) -> None:
    """Weighs a text in which a part is about to be replaced."""
    if isinstance(text, type(old)) and isinstance(text, type(new)):
        check_size(len(text) + text.count(old) * len(new))
