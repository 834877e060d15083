"""JAX's persistent compilation cache, on by default in the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable() -> None:
    """Keeps compiled programs on disk, unless the caller has chosen a directory of their own."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxpage" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
