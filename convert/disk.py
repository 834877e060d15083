"""Whether a model fits on the disk, before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxpage.errors import CapacityError

_GIB = 2**30


def require_disk(need_bytes: int, directory: Path, what: str) -> None:
    """CapacityError when `need_bytes` is more than what is free where `directory` lies."""
    have = shutil.disk_usage(directory).free
    if need_bytes > have:
        raise CapacityError(
            f"got {what}, which needs {need_bytes / _GIB:.2f} GiB, and {have / _GIB:.2f} GiB free "
            f"in {directory}, wanted it to fit; write elsewhere or use a smaller dtype"
        )
