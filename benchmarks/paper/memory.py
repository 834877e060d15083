"""Rows 1 to 4 of the paper's numbers: what memory holds, and how many requests run at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache, partial

from benchmarks.paper.verdict import Changes, Effort, Row, judged, one
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, as_printed
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import paged
from benchmarks.sim.policies import orca

SYSTEMS = ("Orca Max", "Orca Pow2", "Orca Oracle", "paged")
AT_MEANS, REAL, ALPACA = "ShareGPT at the paper's means", "ShareGPT, real lengths", "Alpaca-like"
BATCHES = {"ShareGPT": (7.0, 9.81, 13.62, 30.42), "Alpaca": (7.0, 43.24, 72.75, 132.44)}
"""Fig. 13, in the order of SYSTEMS, at the rates of PRINTED_RATES."""
PRINTED_RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}
SLOW = "steps as slow as fitted to Fig. 13"
"""What `as_printed` does, in the words of a reason."""
Found = dict[str, Outcome]


def workloads(count: int) -> dict[str, list[tuple[int, int]]]:
    """The three sources of lengths, by the name a row gives them."""
    return {
        AT_MEANS: lengths.sharegpt_at_means(),
        REAL: lengths.sharegpt(),
        ALPACA: lengths.alpaca_like(max(5000, count)),
    }


def other_lengths(name: str) -> dict[str, list[tuple[int, int]]]:
    """What else the lengths might have been, in words."""
    if name == REAL:
        return {
            "the lengths scaled to the paper's means": lengths.sharegpt_at_means(),
            "prompts and outputs paired anew": lengths.paired_anew(lengths.sharegpt()),
        }
    if name == AT_MEANS:
        return {
            "prompts and outputs paired anew": lengths.paired_anew(lengths.sharegpt_at_means()),
            "the real lengths, unscaled": lengths.sharegpt(),
        }
    return {}


def saturated(jobs: Seq[lengths.Job]) -> Found:
    """The four systems with every job waiting from the start, until none waits any more."""
    found = {
        f"Orca {kind.capitalize()}": orca(PAPER_SITE, jobs, kind, drained=False)
        for kind in ("max", "pow2", "oracle")
    }
    return {**found, "paged": paged(PAPER_SITE, jobs, drained=False)}


def memory_states(effort: Effort) -> list[Row]:
    """Slots that hold a token's state, of the memory that requests have been given."""
    rows: list[Row] = []
    for name in (AT_MEANS, REAL):
        jobs = lengths.at_once(workloads(effort.requests)[name], effort.requests)
        means, found, others = lengths.mean_of_jobs(jobs), saturated(jobs), _others(name, effort)
        for system, printed in zip(SYSTEMS, (20.4, 26.8, 38.2, 96.3), strict=True):
            row = Row("1", f"token states, % of KV memory, {system}, {name}", f"{printed}",
                      _stored(system, found), one(printed), 3.0, True, means)  # fmt: skip
            rows.append(judged(row, _changes(others, partial(_stored, system))))
        waste = partial(_waste, "paged")
        row = Row("2", f"waste, %, paged, {name}", "< 4", waste(found), (0, 4), 0.0, True, means)
        rows.append(judged(row, _changes(others, waste)))
        waste = partial(_waste, "Orca Max")
        row = Row("2", f"waste, %, Orca Max, {name}", "60-80", waste(found), (60, 80), 3.0, True,
                  means)  # fmt: skip
        rows.append(judged(row, _changes(others, waste)))
    return rows


def batches(effort: Effort) -> list[Row]:
    """Fig. 13: requests that run at once, saturated."""
    rows: list[Row] = []
    for number, name in (("3", AT_MEANS), ("3", REAL), ("4", ALPACA)):
        count = effort.requests * (2 if name == ALPACA else 1)
        pairs, dataset = workloads(count)[name], "Alpaca" if name == ALPACA else "ShareGPT"
        jobs = lengths.at_once(pairs, count)
        means, found, others = lengths.mean_of_jobs(jobs), saturated(jobs), _others(name, effort)
        for system, printed in zip(SYSTEMS, BATCHES[dataset], strict=True):
            changes = _changes(others, partial(_batch, system))
            if system == "paged":
                changes = {**changes, **_at_printed_rate(pairs, dataset, count)}
            row = Row(number, f"mean batch, {system}, {name}", f"{printed}", _batch(system, found),
                      one(printed), 0.25, False, means)  # fmt: skip
            rows.append(judged(row, changes))
    return rows


def _others(name: str, effort: Effort) -> dict[str, Callable[[], Found]]:
    """The four systems on other lengths, run when first asked for."""
    return {
        what: cache(partial(saturated, lengths.at_once(pairs, effort.requests)))
        for what, pairs in other_lengths(name).items()
    }


def _changes(others: dict[str, Callable[[], Found]], figure: Callable[[Found], float]) -> Changes:
    return {what: lambda run=run: figure(run()) for what, run in others.items()}


def _at_printed_rate(pairs: Seq[tuple[int, int]], dataset: str, count: int) -> Changes:
    """Arrivals as in Fig. 13 in place of a full queue: is memory what limits there?"""
    rate = PRINTED_RATES[dataset]
    jobs = lengths.poisson(pairs, rate, count / rate)
    words = f"arrivals at the printed {rate:.0f} requests/s, modelled"
    return {
        words: lambda: paged(PAPER_SITE, jobs).meter.mean("batch"),
        f"{words}, {SLOW}": lambda: paged(as_printed(PAPER_SITE), jobs).meter.mean("batch"),
    }


def _stored(system: str, found: Found) -> float:
    return 100 * found[system].meter.ratio("stored", "reserved")


def _waste(system: str, found: Found) -> float:
    return 100 - _stored(system, found)


def _batch(system: str, found: Found) -> float:
    return found[system].meter.mean("batch")
