"""Numbers and arrays of NumPy, jax or torch, turned into Python's own numbers and lists.

Knows no array library: an array is what has `tolist`, and a scalar is one without axes.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from jaxpage.reading import answering


def plain(value: Any) -> Any:
    """A Python number for a scalar of any library, nested lists for an array, else the value.

    Whole numbers stay whole and others don't become so: 2.0 is no 2. Raises RequestError for an
    array without values, such as one that was donated.
    """
    if isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if not is_array(value):
        return value
    with answering("an array that can't be read", wanted="one that has values", do="pass those"):
        return value.tolist()


def is_array(value: object) -> bool:
    """Whether it is an array or a tensor, even one without axes."""
    return hasattr(value, "tolist") and hasattr(value, "ndim") and hasattr(value, "dtype")
