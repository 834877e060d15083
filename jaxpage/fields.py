"""Typed reading of a model's settings, with errors that name the file and the key."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, get_args, get_origin

from jaxpage.config import DTYPES, MOST_POSITIONS, DType
from jaxpage.errors import CheckpointError

_LEAST, _MOST = 1e-30, 1e30


def words(text: str) -> frozenset[str]:
    """The words of a text as a set; tables of known keys are written so."""
    return frozenset(text.split())


class Fields:
    """A mapping of settings and where it came from."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A whole number in 1 .. `most`; a larger one could only hang what is built from it."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def positions(self, key: str, default: int | None = None) -> int:
        """A length in tokens."""
        return self.integer(key, default, most=MOST_POSITIONS)

    def stretched(self, key: str, length: int, factor: float) -> int:
        """`length` times `factor`, the value of `key`, as a length in tokens."""
        if not length * factor < MOST_POSITIONS + 1:
            raise self.wrong(key, factor, f"a length of at most {MOST_POSITIONS} tokens from it")
        return max(int(length * factor), 1)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """One token id or None."""
        value = self.values.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, value, "a token id")
        return value

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.values.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, of a size that float32 computes with."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST <= value <= _MOST:
            raise self.wrong(key, value, f"a number from {_LEAST} to {_MOST}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def head_dim(self, key: str, hidden_size: int, num_heads: int) -> int:
        """The head dimension, stated or derived; it must be even, as rotary pairs are."""
        if not self.has(key) and hidden_size % num_heads:
            raise self.wrong("hidden size", hidden_size, f"a multiple of {num_heads} heads")
        value = self.integer(key, hidden_size // num_heads)
        if value % 2:
            raise self.wrong(key, value, "an even number")
        return value

    def dtype(self, *keys: str) -> DType:
        """The dtype that the first of `keys` with a value names; float32 when none has one."""
        key = next((key for key in keys if self.has(key)), keys[0])
        name = str(self.values.get(key) or "float32").removeprefix("torch.")
        for known in DTYPES:
            if name == known:
                return known
        raise self.wrong(key, name, ", ".join(DTYPES))

    def typed(self, key: str, kind: Any) -> Any:
        """A value of a type, one of several, or a list of such where `kind` is tuple[type, ...]."""
        value, is_tuple = self.values.get(key), get_origin(kind) is tuple
        items, of = (value, get_args(kind)[0]) if is_tuple else ([value], kind)
        types = get_args(of) or (of,)
        if float in types:
            types += (int,)
        if not isinstance(items, list) or not all(isinstance(item, types) for item in items):
            raise self.wrong(key, value, f"{'a list of ' if is_tuple else ''}{of}")
        return tuple(items) if is_tuple else value

    def fixed(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Refuse a setting whose value this project does not implement; it may be absent."""
        if key in self.values and self.values[key] not in allowed:
            wanted = " or ".join(json.dumps(value) for value in allowed)
            raise self.wrong(key, self.values[key], f"{wanted} ({why})")

    def refuse_unknown(self, known: Collection[str]) -> None:
        """CheckpointError for the first key that is neither used nor known to be harmless."""
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            key = unknown[0]
            raise CheckpointError(
                f"got the unknown key {ascii(key)[1:-1][:80]}={short(self.values[key])} in "
                f"{self.source}, wanted only keys whose meaning is known; remove it if it does "
                "not change the model's arithmetic"
            )

    def wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        """The error for a value that is not what it should be."""
        return CheckpointError(
            f"got {key}={short(value)} in {self.source}, wanted {wanted}; check the model's files"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"got no {key} in {self.source}, wanted a value for it; check the model's files"
            )
        return value


def _shortening() -> reprlib.Repr:
    """Cuts values to one line: a file's may have megabytes, or be nested a thousand deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short


short = _shortening().repr
"""A value of a file for an error's line."""
