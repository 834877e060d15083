"""Rows 5, 8, 9 and 10 of the paper's numbers: sharing, prefixes, block size, swap or recompute."""

from __future__ import annotations

from benchmarks.paper_rows import Effort, Row, in_range
from benchmarks.pressure import swap_or_recompute
from benchmarks.publish import found_record
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES
from benchmarks.sim.outcome import Outcome
from benchmarks.sim.paged import Setting, paged
from benchmarks.sim.policies import orca

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NEAR = 0.95
"""A block size is good while throughput is at least this share of the best's."""
SWAP_BAD = 2.0
"""Swapping is bad from this many times the time of recomputing on."""


def saved_share(outcome: Outcome) -> float:
    """Percent of the blocks that tables would need which sharing saves, over time."""
    sums = outcome.meter.sums
    return 100 * sums["saved"] / (sums["saved"] + sums["blocks"])


def parallel_sampling(effort: Effort) -> list[Row]:
    """Row 5: n samples of one prompt, real forks and copy-on-write."""
    rows: list[Row] = []
    for name, pairs, printed in (
        ("Alpaca-like", lengths.alpaca_like(3000), {2: (6.09,), 4: (8.53,), 6: (9.79,)}),
        ("ShareGPT, real lengths", lengths.sharegpt(), dict.fromkeys((2, 4, 6), (16.2, 30.5))),
        ("ShareGPT at the paper's means", lengths.sharegpt_at_means(),
         dict.fromkeys((2, 4, 6), (16.2, 30.5))),
    ):  # fmt: skip
        for samples, span in printed.items():
            count = max(effort.requests * (2 if name == "Alpaca-like" else 1) // samples, 6)
            jobs = lengths.at_once(pairs, count, samples=samples)
            share = saved_share(paged(PAPER_SITE, jobs, drained=False))
            rows.append(Row(
                "5", f"blocks saved by {samples} samples, %, {name}", "-".join(map(str, span)),
                share, in_range(span[0], span[-1], share), 3.0, True, lengths.mean_of_jobs(jobs),
                "savings follow prompt over output, which the stand-in does not pair as Alpaca does"
                if name == "Alpaca-like" else "outputs longer than prompts share less",
            ))  # fmt: skip
    return rows


def shared_prefix(effort: Effort) -> list[Row]:
    """Row 8: all prompts begin with one translation example, or five."""
    rows: list[Row] = []
    pairs = [
        (max(4, prompt * 2), max(4, round(output * 0.7)))
        for prompt, output in lengths.alpaca_like(2000, sigma=(0.5, 0.5))
    ]
    site = SITES["llama13b_a100"]
    for prefix, printed in ((80, 1.67), (341, 3.58)):
        jobs = lengths.at_once(pairs, max(effort.requests, 20), prefix=prefix)
        ours = paged(site, jobs, Setting(prefix_caching=True)).requests_per_s
        ratio = ours / orca(site, jobs, "oracle").requests_per_s
        rows.append(Row(
            "8", f"throughput over Orca Oracle, {prefix} shared tokens (modelled)", f"{printed}x",
            ratio, printed, 0.25, False, lengths.mean_of_jobs(jobs),
            "the paper prints no WMT16 lengths; ours are assumed, and it measures rates held",
        ))  # fmt: skip
    return rows


def block_sizes(effort: Effort) -> list[Row]:
    """Row 9, its memory part: the largest block size that costs little of the batch."""
    rows: list[Row] = []
    for name, pairs, span in (
        ("ShareGPT", lengths.sharegpt_at_means(), (16, 128)),
        ("Alpaca-like", lengths.alpaca_like(3000), (16, 32)),
    ):
        jobs = lengths.at_once(
            pairs, max(effort.requests * (1 if name == "ShareGPT" else 2) // 3, 20)
        )
        found = {
            size: paged(PAPER_SITE, jobs, Setting(block_size=size), drained=False)
            for size in BLOCK_SIZES[4:]
        }
        rates = {size: o.meter.mean("tokens_per_s") for size, o in found.items()}
        best = max(rates.values())
        largest = max(size for size, rate in rates.items() if rate >= NEAR * best)
        rows.append(Row(
            "9", f"largest good block size, {name} (memory counted, time modelled)",
            f"{span[0]}-{span[1]}", largest, in_range(*span, largest), 0.0, False,
            lengths.mean_of_jobs(jobs), "the model's kernels do not slow down with the block size",
        ))  # fmt: skip
    return rows


def swapping(effort: Effort) -> list[Row]:
    """Row 10: one preempted sequence of 512 tokens, brought back either way.

    The paper draws this without numbers: bad is read as SWAP_BAD times as long or more,
    comparable as within a half.
    """
    site = SITES["llama13b_a100"]
    row = next(each for each in swap_or_recompute(site) if each["tokens"] == 512)
    rows: list[Row] = []
    for size in (1, 16, 64):
        ratio = row[f"swap_{size}_ms"] / row["recompute_ms"]
        printed, nearest, band = "comparable", 1.0, 0.5
        if size == 1:
            printed, nearest, band = f"swap bad (>= {SWAP_BAD:g})", max(SWAP_BAD, ratio), 0.0
        rows.append(Row(
            "10", f"swap over recompute, time, blocks of {size}, 512 tokens (modelled)", printed,
            ratio, nearest, band, False, (512, 0), "the link and the cards differ",
        ))  # fmt: skip
    return rows


def beams(effort: Effort) -> list[Row]:
    """Row 6: what `python -m benchmarks.sharing` measured with the real small model, if it ran.

    Its prompts are 16 short ShareGPT turns, 64 tokens each; the share is that of the peaks.
    """
    record = found_record("sharing") or {}
    rows: list[Row] = []
    for cell in record.get("beams", []):
        share = 100 * (1 - cell["peak_blocks"] / cell["apart_peak_blocks"])
        rows.append(Row(
            "6", f"blocks saved by beams of {cell['width']}, ShareGPT, % (measured, small model)",
            "44.3-66.3", share, in_range(44.3, 66.3, share), 5.0, True, (0, 64),
            "another model; prompts cut at 128 tokens, outputs at 64",
        ))  # fmt: skip
    return rows
