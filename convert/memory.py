"""Whether a model fits: in memory before it is read, on disk before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxpage.errors import CapacityError
from jaxpage.memory import available_bytes

_GIB = 2**30


def require_memory(need_bytes: int, what: str) -> None:
    """CapacityError when `need_bytes` is more than the memory that is free."""
    have = available_bytes()
    if have is not None and need_bytes > have:
        raise CapacityError(
            f"got {what}, which needs {need_bytes / _GIB:.2f} GiB, and {have / _GIB:.2f} GiB of "
            "free memory, wanted it to fit; use a smaller dtype or model"
        )


def require_disk(need_bytes: int, directory: Path, what: str) -> None:
    """CapacityError when `need_bytes` is more than what is free where `directory` lies."""
    have = shutil.disk_usage(directory).free
    if need_bytes > have:
        raise CapacityError(
            f"got {what}, which needs {need_bytes / _GIB:.2f} GiB, and {have / _GIB:.2f} GiB free "
            f"in {directory}, wanted it to fit; write elsewhere or use a smaller dtype"
        )
