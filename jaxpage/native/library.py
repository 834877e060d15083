"""Finds the kernels' shared library, loads it and registers its functions with XLA.

A library that is broken or does not fit counts as none: a line in the log says why, and what would
have called it runs in plain XLA.
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
INTERFACE = 6
"""Counts the changes of the custom calls' names and arguments. It equals that of ffi.cpp: a library
with another number was built from other sources, and is not used."""
CALLS = ("matmul", "rms_norm", "swiglu", "rope_qkv", "argmax_logsumexp", "attention")
"""The custom calls; in the library and in XLA their names begin with `jaxpage_`."""


def is_built() -> bool:
    """Whether the kernels can be called: a library is there, is whole, and this XLA takes it.

    Starts JAX's CPU backend, because only that can tell whether XLA takes it.
    """
    return _library() is not None


def require() -> ctypes.CDLL:
    """The library. Raises ConfigError where `is_built` says no."""
    library = _library()
    if library is None:
        raise ConfigError(f"got a call of a native kernel, wanted it built: {MISSING}")
    return library


def instruction_set() -> str:
    """The set of instructions that the kernels use on this processor: avx512, avx2 or portable."""
    name = require().jaxpage_instruction_set
    name.restype = ctypes.c_char_p
    return name().decode()


@cache
def _library() -> ctypes.CDLL | None:
    """The first library that can be used, registered with XLA; None where none can."""
    return next((each for each in map(load, _files()) if each is not None), None)


def load(path: str) -> ctypes.CDLL | None:
    """The library at `path`, registered with XLA; None, and why in the log, if it can't be used."""
    try:
        if not _is_whole(path):
            raise OSError("it was cut short")
        library = ctypes.CDLL(path)
        if (interface := library.jaxpage_interface()) != INTERFACE:
            raise OSError(f"its interface is {interface}, wanted {INTERFACE}; build it again")
        handlers = {name: getattr(library, name) for name in (f"jaxpage_{call}" for call in CALLS)}
        # XLA refuses what was built for another version of its interface: here, if its backend
        # runs already; otherwise the backend would refuse to start later.
        jax.devices("cpu")
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    except (OSError, AttributeError, ValueError, RuntimeError) as error:
        logger.info("native kernels in %s are not used: %s", path, error)
        return None
    return library


def _files() -> Iterator[str]:
    """Paths to try: a library built in place, then an installed package's, for a bare checkout."""
    for folder in (str(Path(__file__).parent), *(f"{path}/jaxpage/native" for path in sys.path)):
        found = PathFinder.find_spec("_kernels", [folder])
        if found is not None and found.origin is not None:
            yield found.origin


def _is_whole(path: str) -> bool:
    """Whether a library of Linux (64-bit ELF) has all its bytes; True for any other file.

    The loader of Linux does not check, and a process that loads half a file dies of SIGBUS. The
    table of sections ends the file, and the header tells where it is. Other systems' loaders check.
    """
    with Path(path).open("rb") as file:
        head = file.read(64)
    if head[:6] != b"\x7fELF\2\1":  # 64 bits, lower bytes first
        return True
    if len(head) < 64:
        return False
    start, size, count = struct.unpack("<40xQ10x2H2x", head)
    return Path(path).stat().st_size >= start + size * count
