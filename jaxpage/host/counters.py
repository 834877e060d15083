"""What the scheduler counts as it goes: the host's part of EngineStats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums since the start; only the scheduler adds to them."""

    num_steps: int = 0
    prompt_tokens: int = 0
    """Of the requests that began to run, each counted once however often it is recomputed."""
    generated_tokens: int = 0
    """Tokens handed to the engine; surplus ones are not."""
    preemptions_recompute: int = 0
    running_sum: int = 0
    """Over steps, of the running sequences."""
    utilisation_sum: float = 0.0
    """Over steps, of token slots in use over slots of allocated blocks."""

    @property
    def mean_running(self) -> float:
        return self.running_sum / max(self.num_steps, 1)

    @property
    def slot_utilisation(self) -> float:
        return self.utilisation_sum / max(self.num_steps, 1)
