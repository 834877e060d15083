"""What varies by machine: one file, one backend. Nothing else in the package names one.

xla         plain XLA: runs everywhere
reference   the same around a plain, differentiable attention
native      C++ kernels for CPUs
pallas      attention kernels for NVIDIA GPUs, interpreted elsewhere

own_attention is what `jaxpage.functional` puts around a function of the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable

from jaxpage.backends.native import Native
from jaxpage.backends.pallas import Pallas
from jaxpage.backends.reference import Reference
from jaxpage.backends.xla import Xla
from jaxpage.device.ops import Backend
from jaxpage.errors import ConfigError
from jaxpage.native import MISSING, is_built

BACKENDS: dict[str, type[Xla]] = {
    "xla": Xla,
    "native": Native,
    "reference": Reference,
    "pallas": Pallas,
}
"""By the name that options know. Add a row to add a backend, or pass one of your own."""

PLAIN: Backend = Xla()
"""The one that runs everywhere."""


def as_backend(given: str | Backend | type, *, shares_prefixes: bool = True) -> Backend:
    """The backend of that name; a Backend is returned as it is.

    Raises ConfigError for another name, for kernels that were not built, for what is no backend.
    """
    if not isinstance(given, str):
        is_value = isinstance(given, Hashable) and not isinstance(given, type)
        if not (is_value and isinstance(given, Backend)):
            raise ConfigError(
                f"got attention={given!r}, wanted a name or a backend, which programs can be keyed "
                "by; see jaxpage.device.ops.Backend"
            )
        return given
    if given not in BACKENDS:
        raise ConfigError(f"got attention={given!r}, wanted one of {sorted(BACKENDS)}")
    if given == "native" and not is_built():
        raise ConfigError(f"got attention='native', wanted 'xla' or 'reference': {MISSING}")
    return BACKENDS[given](shares_prefixes=shares_prefixes)


def default_backend(platform: str) -> tuple[str, str]:
    """(the fastest backend for a platform as JAX names it, why a faster one is missing or "")."""
    if platform == "gpu":
        return "pallas", ""
    if platform == "cpu":
        return ("native", "") if is_built() else ("xla", MISSING)
    return "xla", ""
