"""What sampling must do, in float64 NumPy with full sorts: one draw at a time, no cleverness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Settings:
    """One draw: its sequence so far (prompt first) and everything it asks for."""

    tokens: tuple[int, ...] = (0,)
    prompt_len: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def output(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]


def edited_logits(logits: np.ndarray, settings: Settings) -> np.ndarray:
    """The logits that greedy takes the largest of."""
    x = logits.astype(np.float64)
    if settings.allowed is not None:
        x[np.setdiff1d(np.arange(x.size), settings.allowed)] = -np.inf
    if len(settings.output) < settings.min_tokens:
        x[list(settings.stop_ids)] = -np.inf
    for *prefix, end in settings.bad_words:
        if not prefix or list(settings.output[-len(prefix) :]) == prefix:
            x[end] = -np.inf
    for token, bias in settings.bias.items():
        x[token] += bias
    for token in set(settings.tokens):
        x[token] *= 1 / settings.repetition if x[token] > 0 else settings.repetition
    for token in settings.output:
        x[token] -= settings.frequency
    for token in set(settings.output):
        x[token] -= settings.presence
    return x


def kept(scores: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """[V] bool: what min-p, then top-k, then top-p leave; equal scores stay or go together."""
    probs = np.exp(scores - scores.max())
    mask = (probs >= min_p) & (probs > 0)
    if top_k:
        mask &= scores >= np.sort(np.where(mask, scores, -np.inf))[::-1][min(top_k, mask.size) - 1]
    if top_p < 1:
        order = np.argsort(-np.where(mask, scores, -np.inf), kind="stable")
        mass = np.cumsum(np.where(mask, probs, 0)[order])
        last = np.searchsorted(mass, top_p * mass[-1])
        mask &= scores >= scores[order[last]]
    return mask


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def processed_logprobs(logits: np.ndarray, settings: Settings) -> np.ndarray:
    """[V] log-probabilities of the distribution that the token is drawn from."""
    x = edited_logits(logits, settings)
    if settings.temperature < 1e-5:
        return log_softmax(x)
    x = x / settings.temperature
    mask = kept(x, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
    return log_softmax(np.where(mask, x, -np.inf))


def column(rows: Sequence[Settings], name: str) -> list:
    return [getattr(settings, name) for settings in rows]
