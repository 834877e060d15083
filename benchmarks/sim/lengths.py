"""Request lengths: real ShareGPT pairs, the same at the paper's means, and Alpaca-like ones.

`data/sharegpt_lengths.csv` has the (prompt, output) lengths of 5,280 first turns, in tokens of a
32,000-piece vocabulary. Alpaca's own text is not here: its stand-in draws lognormal lengths with
the paper's two means; the spread of the outputs is fitted, see `ALPACA_SIGMA`.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.common.sharegpt import DATA

MAX_TOKENS = 2048
"""Of prompt and output together: the models' limit in the paper."""
SHAREGPT_MEANS = (161.31, 337.99)
ALPACA_MEANS = (19.31, 58.45)
"""Mean input and output tokens: PagedAttention paper, Fig. 11."""
ALPACA_SIGMA = (0.7, 0.87)
"""Lognormal sigma of prompt and output. The output's is the one free number: chosen so that Orca
Oracle's batch comes out as printed (72.75); the other systems' batches then follow."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace: when it comes and how long it is."""

    prompt: int
    output: int
    arrival_s: float = 0.0
    samples: int = 1
    prefix: int = 0
    """Leading prompt tokens that all jobs of a tenant share."""
    tenant: int = 0


def sharegpt() -> list[tuple[int, int]]:
    """The real pairs, in file order."""
    with open(DATA / "sharegpt_lengths.csv", newline="") as file:
        return [
            (int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)
        ]


def sharegpt_at_means(means: tuple[float, float] = SHAREGPT_MEANS) -> list[tuple[int, int]]:
    """The real pairs scaled so that both means are the given ones after the cut at MAX_TOKENS."""
    pairs = sharegpt()
    scales = [mean / have for mean, have in zip(means, mean_lengths(pairs), strict=True)]
    for _ in range(8):
        found = [_scaled(pair, scales) for pair in pairs]
        actual = mean_lengths(found)
        scales = [s * want / have for s, want, have in zip(scales, means, actual, strict=True)]
    return [_scaled(pair, scales) for pair in pairs]


def paired_anew(pairs: Iterable[tuple[int, int]], *, seed: int = 0) -> list[tuple[int, int]]:
    """The same prompts and outputs, but which goes with which is drawn by lot."""
    prompts, outputs = map(list, zip(*pairs, strict=True))
    random.Random(seed).shuffle(outputs)
    pairs = zip(prompts, outputs, strict=True)
    return [(prompt, min(output, MAX_TOKENS - prompt)) for prompt, output in pairs]


def alpaca_like(
    count: int, *, seed: int = 0, sigma: tuple[float, float] = ALPACA_SIGMA
) -> list[tuple[int, int]]:
    """Made-up pairs with Alpaca's printed means."""
    rng = random.Random(seed)
    mus = [math.log(mean) - s * s / 2 for mean, s in zip(ALPACA_MEANS, sigma, strict=True)]
    return [
        (
            max(1, min(512, round(rng.lognormvariate(mus[0], sigma[0])))),
            max(1, min(1024, round(rng.lognormvariate(mus[1], sigma[1])))),
        )
        for _ in range(count)
    ]


def at_once(
    pairs: Iterable[tuple[int, int]],
    count: int,
    *,
    samples: int = 1,
    prefix: int = 0,
    seed: int = 1,
) -> list[Job]:
    """A saturated trace: `count` jobs drawn from the pairs, all waiting from the start."""
    drawn = _draw(list(pairs), count, random.Random(seed))
    return [Job(p + prefix, o, samples=samples, prefix=prefix) for p, o in drawn]


def poisson(
    pairs: Iterable[tuple[int, int]],
    rate: float,
    seconds: float,
    *,
    seed: int = 1,
    samples: int = 1,
    prefix: int = 0,
) -> list[Job]:
    """Jobs that arrive with exponential gaps, `rate` a second for `seconds`."""
    rng = random.Random(seed)
    source, jobs, now = list(pairs), [], rng.expovariate(rate)
    while now < seconds:
        prompt, output = source[rng.randrange(len(source))]
        jobs.append(Job(prompt + prefix, output, now, samples, prefix))
        now += rng.expovariate(rate)
    return jobs


def mean_lengths(pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
    prompts, outputs = zip(*pairs, strict=True)
    return statistics.mean(prompts), statistics.mean(outputs)


def mean_of_jobs(jobs: Seq[Job]) -> tuple[float, float]:
    return mean_lengths((job.prompt, job.output) for job in jobs)


def _draw(pairs: list[tuple[int, int]], count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Of every part of the outputs' range its share, so that few jobs have the source's means."""
    ordered = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    apart, first = len(ordered) / count, rng.random()
    found = [ordered[int((index + first) * apart)] for index in range(count)]
    rng.shuffle(found)
    return found


def _scaled(pair: tuple[int, int], scales: list[float]) -> tuple[int, int]:
    prompt = max(1, min(round(pair[0] * scales[0]), MAX_TOKENS // 2))
    return prompt, max(1, min(round(pair[1] * scales[1]), MAX_TOKENS - prompt))
