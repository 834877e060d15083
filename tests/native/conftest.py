"""Everything here needs the kernels built; skipped with one line that says how to."""

from __future__ import annotations

import pytest

from jaxpage import native


@pytest.fixture(autouse=True)
def _built() -> None:
    if not native.is_built():
        pytest.skip("native kernels not built: python setup.py build_ext --inplace")
