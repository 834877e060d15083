"""Whether a model fits in this machine's memory, asked before anything is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from convert.assemble import NUMPY_DTYPES, LeafPlan
from jaxpage.config import ModelConfig
from jaxpage.errors import CapacityError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(plans: Iterable[LeafPlan], config: ModelConfig) -> None:
    """CapacityError when the parameters are larger than the memory that is free."""
    itemsize = NUMPY_DTYPES[config.dtype].itemsize
    need = sum(math.prod(plan.shape) for plan in plans) * itemsize
    have = available_bytes()
    if have is not None and need > have:
        raise CapacityError(
            f"got a model of {need / 2**30:.2f} GiB in {config.dtype} and {have / 2**30:.2f} GiB "
            "of free memory, wanted it to fit; use a smaller dtype or model"
        )


def available_bytes() -> int | None:
    """Memory that can still be taken: the system's, or the container's where that is less."""
    found = [value for value in (_system_bytes(), _cgroup_bytes()) if value is not None]
    return min(found) if found else None


def _system_bytes() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if pages in names and "SC_PAGE_SIZE" in names:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_bytes() -> int | None:
    """What a version 2 control group leaves; file cache in its count can be given back."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stats = dict(
            line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines() if line
        )
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(int(limit) - used + int(stats.get("inactive_file", 0)), 0)
