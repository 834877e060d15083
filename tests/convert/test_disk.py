"""The refusal that says need and have."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.disk import require_disk
from jaxpage.errors import CapacityError


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    require_disk(1, tmp_path, "x")
    with pytest.raises(CapacityError, match=r"needs 1073741824\.00 GiB, and .* GiB free in"):
        require_disk(2**60, tmp_path, "x")
