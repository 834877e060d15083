"""How much memory is left. Decides nothing."""

from __future__ import annotations

import os
from pathlib import Path

from jaxpage.terms import default_device

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Bytes that the default device can still take: its limit less its use, or the host's."""
    stats = default_device().memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return available_bytes()


def available_bytes() -> int | None:
    """Bytes of host memory left: the system's, or the container's if that is less."""
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
    """Bytes that a version 2 control group leaves; its file cache counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        stats = dict(line.split() for line in lines if line)
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(int(limit) - used + int(stats.get("inactive_file", 0)), 0)
