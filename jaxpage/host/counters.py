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
    """Groups, each time one gave way so."""
    preemptions_swap: int = 0
    swapped_out_blocks: int = 0
    """Moved to the host, a shared one once each time."""
    prefix_hit_tokens: int = 0
    """Of prompts when they first ran: what a preempted request finds again is no hit."""
    running_sum: int = 0
    """Over steps, of the sequences that run."""
    utilisation_sum: float = 0.0
    """Over steps, of token slots in use over slots of allocated blocks."""

    @property
    def mean_running(self) -> float:
        return self.running_sum / max(self.num_steps, 1)

    @property
    def slot_utilisation(self) -> float:
        return self.utilisation_sum / max(self.num_steps, 1)
