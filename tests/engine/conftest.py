"""What every test of the engine runs under: a step moves nothing to the device but its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from jaxpage.engine.runner import Runner, Ticket
from jaxpage.host.plan import StepPlan


@pytest.fixture(autouse=True, scope="module")
def _no_implicit_transfers() -> Iterator[None]:
    """Fails a step that hands a program something that is not on the device."""
    dispatch = Runner.dispatch

    def guarded(runner: Runner, plan: StepPlan) -> Ticket:
        with jax.transfer_guard("disallow"):
            return dispatch(runner, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "dispatch", guarded)
        yield
