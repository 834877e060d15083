"""What every test of the engine runs under: a step moves nothing to the device but its inputs.

It imports the engine inside the fixture: a conftest may be loaded before pytest's option that
has the shapes of jaxpage.device checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_implicit_transfers() -> Iterator[None]:
    """Fails a step that hands a program something that is not on the device."""
    from jaxpage.engine.runner import Runner

    dispatch = Runner.dispatch

    def guarded(runner: Runner, plan: Any) -> Any:
        with jax.transfer_guard("disallow"):
            return dispatch(runner, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "dispatch", guarded)
        yield
