"""The shared object of the kernels: found, loaded and registered with XLA, or left alone.

Whatever is wrong with it, its caller falls back to XLA: a library that does not fit, or is broken,
is as good as none.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import jax

from jaxpage.errors import ConfigError

logger = logging.getLogger("jaxpage")

MISSING = (
    "found no native CPU kernels that load here, so this runs in plain XLA, at half the speed; "
    "install with a C++ compiler at hand (in a checkout: python setup.py build_ext --inplace)"
)
"""The one line that is shown where XLA runs instead."""
INTERFACE = 5
"""Counts the changes of what ffi.cpp exports and takes; a library of another count is not used."""
CALLS = ("product", "norm", "gate", "rotate", "summarise", "attention")


def is_built() -> bool:
    """Whether the kernels can be called in this installation: built, whole, and taken by its XLA.

    Starts JAX's CPU backend, which alone can tell the last.
    """
    return _library() is not None


def require() -> ctypes.CDLL:
    """The library. Raises ConfigError where `is_built` says no."""
    library = _library()
    if library is None:
        raise ConfigError(f"got a call of a native kernel, wanted it built: {MISSING}")
    return library


def instruction_set() -> str:
    """Which of its forms the library runs on this processor: avx512, avx2 or portable."""
    name = require().jaxpage_instruction_set
    name.restype = ctypes.c_char_p
    return name().decode()


@cache
def _library() -> ctypes.CDLL | None:
    """The first that can be used, its functions registered with XLA; None where none can."""
    return next((each for each in map(load, _files()) if each is not None), None)


def load(path: str) -> ctypes.CDLL | None:
    """The library at `path`, registered with XLA; None, and a line in the log, if it is no use."""
    try:
        if not _is_whole(path):
            raise OSError("it was cut short")
        library = ctypes.CDLL(path)
        if (interface := library.jaxpage_interface()) != INTERFACE:
            raise OSError(f"its interface is {interface}, wanted {INTERFACE}")
        handlers = {name: getattr(library, name) for name in (f"jaxpage_{call}" for call in CALLS)}
        # XLA refuses what was built for another version of its interface. With a backend that runs
        # it does so here; one that starts later would refuse to start.
        jax.devices("cpu")
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    except (OSError, AttributeError, ValueError, RuntimeError) as error:
        logger.info("native kernels in %s are not used: %s", path, error)
        return None
    return library


def _files() -> Iterator[str]:
    """What is built here, then what the installed package has: a checkout runs with that."""
    for folder in (str(Path(__file__).parent), *(f"{path}/jaxpage/native" for path in sys.path)):
        found = PathFinder.find_spec("_kernels", [folder])
        if found is not None and found.origin is not None:
            yield found.origin


def _is_whole(path: str) -> bool:
    """Whether a file of Linux (ELF, of 64 bits) has all its bytes; others are for their loader.

    That of Linux checks nothing and dies of SIGBUS. A file ends with its table of sections.
    """
    with Path(path).open("rb") as file:
        head = file.read(64)
    if head[:6] != b"\x7fELF\2\1":  # 64 bits, lower bytes first
        return True
    if len(head) < 64:
        return False
    start, size, count = struct.unpack("<40xQ10x2H2x", head)
    return Path(path).stat().st_size >= start + size * count
