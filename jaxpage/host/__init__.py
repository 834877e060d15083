"""The host: plain Python that decides what each step of the device does. Loads no JAX, no NumPy."""

from jaxpage.host.ladder import Ladder
from jaxpage.host.plan import (
    Draw,
    PlannedRow,
    Request,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from jaxpage.host.scheduler import Scheduler

__all__ = [
    "Draw",
    "Ladder",
    "PlannedRow",
    "Request",
    "Scheduler",
    "SequenceUpdate",
    "StepPlan",
    "StepResult",
]
