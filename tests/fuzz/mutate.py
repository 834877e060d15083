"""Seeded damage to a file: to its bytes, to its lengths, to a JSON tree, to a member of an archive.

The same generator gives the same damage, so that a seed and a name are a whole report.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

LENGTHS = (
    0,
    1,
    2,
    7,
    255,
    2**16,
    2**30,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
)
NUMBERS = (0, -1, 1, 2, 3, 2**24, 2**30, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400)
FLOATS = (0.0, -1.0, 0.5, 1e-320, 1e-30, 1e30, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "x" * 300,
    "x" * 100_000,
    "../../etc/passwd",
    "\0",
    "\ud800",
    "é" * 10,
    "{{",
    "-1",
)
MOST_EDITS = 3


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to three pieces of damage, of the kinds that its own kind allows."""
    for _ in range(rng.randint(1, MOST_EDITS)):
        data = rng.choice(_ways(data))(data, rng)
    return data


def _ways(data: bytes) -> list[Callable[[bytes, random.Random], bytes]]:
    ways: list[Callable[[bytes, random.Random], bytes]] = [_bytes, _lengths]
    if data[:1] in (b"{", b"["):
        return [_bytes, _json, _json, _json]
    if _header_of_safetensors(data):
        return [*ways, _safetensors, _safetensors]
    if data[:4] == b"PK\3\4":
        return [*ways, _archive, _archive]
    return ways


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, inserted, doubled, zeroed, or moved."""
    start = rng.randrange(len(data) + 1)
    # Most of a file is weights, whose bits mean nothing: heads and ends are tried more.
    if rng.random() < 0.5:
        start = min(start, int(rng.expovariate(1 / 300)))
    stop = min(len(data), start + int(rng.expovariate(1 / 8)) + 1)
    piece = data[start:stop]
    match rng.randrange(8):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:start] + bytes(len(piece)) + data[stop:]
        case 3:
            return data[:start] + piece * rng.choice((2, 3, 1000)) + data[stop:]
        case 4:
            return data[:start] + rng.randbytes(len(piece) or 1) + data[start:]
        case 5:
            return data[:start] + b"\xff" * len(piece) + data[stop:]
        case 6:
            return (
                data[:start] + bytes(byte ^ 1 << rng.randrange(8) for byte in piece) + data[stop:]
            )
        case _:
            return data[:start] + rng.randbytes(len(piece)) + data[stop:]


def _lengths(data: bytes, rng: random.Random) -> bytes:
    """Four or eight bytes near the head, as counts and lengths are, become a large number."""
    size = rng.choice((4, 8))
    start = min(int(rng.expovariate(1 / 400)), max(len(data) - size, 0))
    start -= start % rng.choice((1, 4))
    value = rng.choice((*LENGTHS, rng.randrange(2**64))) % 2 ** (8 * size)
    return data[:start] + value.to_bytes(size, "little") + data[start + size :]


def _json(data: bytes, rng: random.Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    try:
        return _dump(_damaged(tree, rng), rng)
    except (RecursionError, ValueError):
        return _bytes(data, rng)


def _dump(tree: Any, rng: random.Random) -> bytes:
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.05:  # the same key twice
        text = text.replace("{", '{"vocab_size": null, "a": 1, "a": 2, ', 1)
    if rng.random() < 0.03:
        text = text.replace(":", ":" + "[" * 3000, 1)
    return text.encode("utf-8", errors="surrogatepass")


def _damaged(tree: Any, rng: random.Random) -> Any:
    """The tree with one node changed."""
    places = list(_places(tree))
    if not places:
        return _value(tree, rng)
    parent, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            other = rng.choice(list(parent))
            parent[key], parent[other] = parent[other], parent[key]
        case _:
            parent[key] = _value(parent[key], rng)
    return tree


def _places(tree: Any) -> Any:
    """(parent, key) of every node below the root; long lists are sampled by their first entries."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:50])
    if not isinstance(tree, dict | list):
        return
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _value(old: Any, rng: random.Random) -> Any:
    """Something else in the place of a value."""
    match rng.randrange(9):
        case 0:
            return None
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice(FLOATS)
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice((True, False, [], {}))
        case 5:
            return [old] * rng.choice((1, 2, 1000))
        case 6:
            return {"a": old, "": None}
        case 7:
            return str(old)
        case _:
            nested: Any = old
            for _ in range(rng.choice((3, 100, 900))):
                nested = [nested]
            return nested


def _header_of_safetensors(data: bytes) -> bytes | None:
    if len(data) < 9 or data[8:9] != b"{":
        return None
    (length,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + length] if length <= len(data) - 8 else None


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header as a JSON tree, its length made right."""
    header = _header_of_safetensors(data)
    if header is None:
        return _bytes(data, rng)
    changed = _json(header, rng)
    return struct.pack("<Q", len(changed)) + changed + data[8 + len(header) :]


def _archive(data: bytes, rng: random.Random) -> bytes:
    """One member of a zip file, mostly the pickled names and shapes, its checksum made right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, OSError):
        return _bytes(data, rng)
    pickles = [name for name in members if name.endswith(".pkl")]
    name = rng.choice(pickles if pickles and rng.random() < 0.7 else sorted(members) or [""])
    if rng.random() < 0.1:
        members.pop(name, None)
    else:
        members[name] = rng.choice((_bytes, _pickle))(members.get(name, b""), rng)
    kind = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", kind) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return packed.getvalue()


def _pickle(data: bytes, rng: random.Random) -> bytes:
    """A small number of a pickle becomes another: shapes, strides, offsets and sizes."""
    places = [i for i, byte in enumerate(data) if byte in b"KMJ"]
    if not places:
        return _bytes(data, rng)
    start = rng.choice(places)
    size = {ord("K"): 2, ord("M"): 3, ord("J"): 5}[data[start]]
    value = rng.choice((*LENGTHS, rng.randrange(2**31)))
    # LONG1: a length of one byte, then a number of so many.
    number = b"\x8a" + bytes([9]) + value.to_bytes(9, "little", signed=True)
    if rng.random() < 0.2:
        number = b"J" + (-rng.randrange(1, 2**31)).to_bytes(4, "little", signed=True)
    return data[:start] + number + data[start + size :]
