"""Rows 5, 6, 8, 9 and 10 of the paper's numbers: sharing, prefixes, block size, swap, recompute."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common.report import found_record
from benchmarks.paper.memory import (
    ALPACA,
    AT_MEANS,
    PRINTED_RATES,
    REAL,
    SLOW,
    other_lengths,
    workloads,
)
from benchmarks.paper.verdict import Effort, Row, judged, one
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES, Site, as_printed, swap_or_recompute
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import Setting, paged
from benchmarks.sim.policies import orca

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NEAR = 0.95
"""A block size is good while throughput is at least this share of the best's."""
SWAP_BAD = 2.0
"""Swapping is bad from this many times the time of recomputing on."""
Spans = dict[int, tuple[float, float]]
SAMPLES: dict[str, Spans] = {
    "Alpaca": {2: one(6.09), 4: one(8.53), 6: one(9.79)},
    "ShareGPT": {2: one(16.2), 4: (16.2, 30.5), 6: one(30.5)},
}
"""Fig. 15a by samples; of ShareGPT the text prints the ends alone."""
BEAMS: dict[str, Spans] = {
    "Alpaca": {2: one(37.56), 4: one(53.13), 6: one(55.16)},
    "ShareGPT": {2: one(44.3), 4: (44.3, 66.3), 6: one(66.3)},
}
"""Fig. 15b by beam width."""
BEAMS_COMMAND = "python -m benchmarks.paper.beams"


def saved_share(outcome: Outcome) -> float:
    """Percent of the blocks that tables would need which sharing saves, over time."""
    sums = outcome.meter.sums
    return 100 * sums["saved"] / (sums["saved"] + sums["blocks"])


def parallel_sampling(effort: Effort) -> list[Row]:
    """Row 5: n samples of one prompt, real forks and copy-on-write."""
    rows: list[Row] = []
    for name in (ALPACA, AT_MEANS, REAL):
        pairs = workloads(effort.requests)[name]
        for samples, span in SAMPLES["Alpaca" if name == ALPACA else "ShareGPT"].items():
            row = Row("5", f"blocks saved by {samples} samples, %, {name}", _words(span),
                      _saved(pairs, samples, effort), span, 3.0, True,
                      lengths.mean_lengths(pairs))  # fmt: skip
            changes = {
                what: partial(_saved, others, samples, effort)
                for what, others in other_lengths(name).items()
            }
            rows.append(judged(row, changes))
    return rows


def _saved(pairs: list[tuple[int, int]], samples: int, effort: Effort) -> float:
    jobs = lengths.at_once(pairs, effort.requests, samples=samples)
    return saved_share(paged(PAPER_SITE, jobs, drained=False))


def _words(span: tuple[float, float]) -> str:
    return "-".join(str(value) for value in dict.fromkeys(span))


def beams(effort: Effort) -> list[Row]:
    """Row 6: what BEAMS_COMMAND counted with the real small model, if it ran."""
    del effort
    record = found_record("paper_beams") or {"beams": []}
    return [_beam_row(cell) for cell in record["beams"]]


def _beam_row(cell: dict[str, Any]) -> Row:
    span = BEAMS[cell["dataset"]][cell["width"]]
    what = f"blocks saved by beams of {cell['width']}, %, {cell['lengths']} (counted, small model)"
    row = Row("6", what, _words(span), cell["saved_percent"], span, 5.0, True,
              tuple(cell["mean_lengths"]))  # fmt: skip
    return judged(row, {"the peaks in place of the mean": lambda: cell["saved_at_peak_percent"]})


def shared_prefix(effort: Effort) -> list[Row]:
    """Row 8: all prompts begin with one translation example, or five.

    The paper prints no lengths of WMT16; ours are assumed.
    """
    rows: list[Row] = []
    pairs = [
        (max(4, prompt * 2), max(4, round(output * 0.7)))
        for prompt, output in lengths.alpaca_like(2000, sigma=(0.5, 0.5))
    ]
    site = SITES["llama13b_a100"]
    for prefix, printed in ((80, 1.67), (341, 3.58)):
        jobs = lengths.at_once(pairs, max(effort.requests, 20), prefix=prefix)
        row = Row("8", f"throughput over Orca Oracle, {prefix} shared tokens (modelled)",
                  f"{printed}x", _over_oracle(site, jobs), one(printed), 0.25, False,
                  lengths.mean_of_jobs(jobs))  # fmt: skip
        rows.append(judged(row, {SLOW: partial(_over_oracle, as_printed(site), jobs)}))
    return rows


def _over_oracle(site: Site, jobs: list[lengths.Job]) -> float:
    ours = paged(site, jobs, Setting(prefix_caching=True)).requests_per_s
    return ours / orca(site, jobs, "oracle").requests_per_s


def block_sizes(effort: Effort) -> list[Row]:
    """Row 9, its memory part: the largest block size that costs little of the batch."""
    rows: list[Row] = []
    for name, span in ((AT_MEANS, (16, 128)), (ALPACA, (16, 32))):
        pairs = workloads(effort.requests)[name]
        jobs = lengths.at_once(pairs, max(effort.requests // 2, 20))
        rates = {
            size: paged(PAPER_SITE, jobs, Setting(block_size=size), drained=False).meter.mean(
                "tokens_per_s"
            )
            for size in BLOCK_SIZES
        }
        row = Row("9", f"largest good block size, {name} (memory counted, time modelled)",
                  f"{span[0]}-{span[1]}", _largest_good(rates, NEAR), span, 0.0, False,
                  lengths.mean_of_jobs(jobs))  # fmt: skip
        changes: dict[str, Callable[[], float]] = {
            f"good from {share:.0%} of the best on": partial(_largest_good, rates, share)
            for share in (0.98, 0.9)
        }
        rate = PRINTED_RATES["Alpaca" if name == ALPACA else "ShareGPT"]
        changes[f"latency at {rate:.0f} requests/s, {SLOW}"] = partial(
            _largest_good_at, rate, pairs, effort
        )
        rows.append(judged(row, changes))
    return rows


def _largest_good_at(rate: float, pairs: list[tuple[int, int]], effort: Effort) -> int:
    """By mean latency a token at a rate, as Fig. 18b, in place of a full queue's throughput."""
    jobs, site = lengths.poisson(pairs, rate, 2 * effort.requests / rate), as_printed(PAPER_SITE)
    speeds = {
        size: 1 / paged(site, jobs, Setting(block_size=size)).mean_normalised
        for size in BLOCK_SIZES
    }
    return _largest_good(speeds, NEAR)


def _largest_good(rates: dict[int, float], share: float) -> int:
    return max(size for size, rate in rates.items() if rate >= share * max(rates.values()))


def swapping(effort: Effort) -> list[Row]:
    """Row 10: one preempted sequence of 512 tokens, brought back either way.

    The paper draws this without numbers: bad is read as SWAP_BAD times as long or more,
    comparable as within a half.
    """
    del effort
    site = SITES["llama13b_a100"]
    costs = next(each for each in swap_or_recompute(site) if each["tokens"] == 512)
    rows: list[Row] = []
    for size in (1, 16, 64):
        ratio = costs[f"swap_{size}_ms"] / costs["recompute_ms"]
        printed, span, band = "comparable", one(1.0), 0.5
        if size == 1:
            printed, span, band = f"swap bad (>= {SWAP_BAD:g})", (SWAP_BAD, math.inf), 0.0
        rows.append(Row(
            "10", f"swap over recompute, time, blocks of {size}, 512 tokens (modelled)", printed,
            ratio, span, band, False, (512, 0),
        ))  # fmt: skip
    return rows
