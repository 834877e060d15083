"""Load rising through capacity: what happens when more sequences run than blocks remain.

    python -m benchmarks.service.pressure            a simulation, then the real engine, small pool
    python -m benchmarks.service.pressure --no-live  the simulation alone
    python -m benchmarks.service.pressure --quick    a few requests on a small model
    ... --keep                               writes to benchmarks/results

Simulated: LLaMA-13B on an A100-40GB, the real scheduler, modelled seconds. Live: the model at
hand on this machine, a pool of a few sequences, measured seconds. Goodput counts the tokens of
requests that ended before the last one came.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, Series, line_chart
from benchmarks.sim import lengths
from benchmarks.sim.cost import SITES, SWAP_BLOCK_SIZES, Site, swap_or_recompute
from benchmarks.sim.outcome import Outcome, percentile
from benchmarks.sim.paged import Setting, paged

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


def main() -> None:
    args = _arguments()
    site = SITES["llama13b_a100"]
    requests = 30 if args.quick else args.requests
    loads = (0.5, 1.5) if args.quick else LOADS
    simulated = simulate_loads(site, requests, loads)
    record: dict[str, Any] = {
        "site": site.constants(), "simulated": simulated,
        "answers": simulate_answers(site, requests, (16,) if args.quick else SWAP_BLOCK_SIZES),
        "swap_or_recompute": swap_or_recompute(site),
        "prefix_cache": simulate_prefixes(site, requests),
        "live": [] if args.no_live else live_loads(args, loads),
    }  # fmt: skip
    lines, pictures = report_lines(record), {"": picture(record)}
    save("pressure", record, lines=lines, pictures=pictures, is_quick=args.quick, keep=args.keep)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=500, help="simulated, by load")
    parser.add_argument("--live-requests", type=int, default=60)
    parser.add_argument("--no-live", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    return parser.parse_args()


def simulate_loads(site: Site, requests: int, loads: tuple[float, ...]) -> list[dict[str, Any]]:
    """Latency, preemptions and goodput by load; load 1 is the rate served when all wait."""
    pairs = lengths.sharegpt()
    capacity = simulated_capacity(site, pairs, requests)
    found: list[dict[str, Any]] = []
    for load in loads:
        jobs = lengths.poisson(pairs, capacity * load, 2 * requests / capacity)
        found.append({"load": load, **summary(paged(site, jobs))})
    return found


def simulated_capacity(site: Site, pairs: list[tuple[int, int]], requests: int) -> float:
    """Requests a second while more wait than fit."""
    outcome = paged(site, lengths.at_once(pairs, 3 * requests), drained=False)
    mean_output = lengths.mean_lengths(pairs)[1]
    return outcome.counters["generated_tokens"] / outcome.end_s / mean_output


def simulate_answers(
    site: Site, requests: int, block_sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Recompute beside swap at a load of 1.5, by block size."""
    pairs = lengths.sharegpt()
    capacity = simulated_capacity(site, pairs, requests // 2)
    jobs = lengths.poisson(pairs, capacity * 1.5, requests / capacity)
    found: list[dict[str, Any]] = []
    for block_size in block_sizes:
        for answer, swap_bytes in (("recompute", 0.0), ("swap", 8e9)):
            setting = Setting(block_size=block_size, preemption=answer, swap_bytes=swap_bytes)
            row = summary(paged(site, jobs, setting))
            row["transfers"] = row["blocks_moved"] * site.cost.shape.layers * 2
            found.append({"block_size": block_size, "answer": answer, **row})
    return found


def simulate_prefixes(site: Site, requests: int) -> list[dict[str, Any]]:
    """A load of 1.25 of prompts that share 512 leading tokens, prefix cache off and on."""
    pairs = lengths.alpaca_like(2000)
    longer = [(prompt + 512, output) for prompt, output in pairs]
    capacity = simulated_capacity(site, longer, requests)
    jobs = lengths.poisson(pairs, capacity * 1.25, requests / capacity, prefix=512)
    found: list[dict[str, Any]] = []
    for is_on in (False, True):
        row = summary(paged(site, jobs, Setting(prefix_caching=is_on)))
        found.append({"prefix_cache": is_on, **row})
    return found


def summary(outcome: Outcome) -> dict[str, Any]:
    """One run's figures: percentiles in modelled seconds, and what was wasted."""
    counters, last = outcome.counters, outcome.jobs[-1].arrival_s
    in_window = sum(
        job.output
        for job, done in zip(outcome.jobs, outcome.finish_s, strict=True)
        if done is not None and done <= last
    )
    normalised = outcome.normalised()
    useful = counters["prompt_tokens"] + counters["generated_tokens"] - outcome.num_done
    row: dict[str, Any] = {
        "requests": len(outcome.jobs),
        "lost": len(outcome.jobs) - outcome.num_done,
        "goodput_tokens_per_s": in_window / last,
        "mean_batch": outcome.meter.mean("batch"),
        "preemptions": counters.get("preemptions_recompute", 0)
        + counters.get("preemptions_swap", 0),
        "wasted_share": max(outcome.counters["tokens_computed"] / useful - 1, 0.0),
        "blocks_moved": counters["blocks_moved"],
        "prefix_hit_tokens": counters.get("prefix_hit_tokens", 0),
        "worst_over_median": max(normalised) / statistics.median(normalised),
    }
    for name, values in (("ttft", outcome.first_token()), ("latency", outcome.latencies())):
        for share in (50, 90, 99):
            row[f"{name}_p{share}_s"] = percentile(values, share / 100)
    row["normalised_p50_s"] = statistics.median(normalised)
    return row


def live_loads(args: argparse.Namespace, loads: tuple[float, ...]) -> list[dict[str, Any]]:
    """The real engine on a pool of about six sequences, load by load."""
    from benchmarks.service.live import capacity, serve
    from jaxpage import LLM

    count = 8 if args.quick else args.live_requests
    pairs = [(8 + i % 5 * 12, 6 + i % 7 * 9) for i in range(count)]
    if args.quick:
        pairs = [(4 + i % 3, 3 + i % 4) for i in range(count)]
    llm = LLM(args.model, dtype="float32", num_blocks=28 if not args.quick else 12,
              max_num_seqs=16, max_model_len=128, seed=0)  # fmt: skip
    rate = capacity(llm, lengths.at_once(pairs, count))
    found: list[dict[str, Any]] = []
    before = 0
    for load in loads:
        jobs = lengths.poisson(pairs, rate * load, count / (rate * load) * 1.1)
        served = serve(llm, jobs)
        last = jobs[-1].arrival_s
        preemptions = served.stats["preemptions_recompute"] + served.stats["preemptions_swap"]
        found.append({"load": load, **served.summary(), "preemptions": preemptions - before,
                      "goodput_tokens_per_s": served.window_tokens / last})  # fmt: skip
        before = preemptions
    return found


def report_lines(record: dict[str, Any]) -> list[str]:
    loads = (
        "load", "goodput_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "latency_p50_s",
        "latency_p99_s", "preemptions", "worst_over_median", "lost",
    )  # fmt: skip
    lines = ["Simulated: LLaMA-13B on A100-40GB, ShareGPT lengths; seconds are modelled:", ""]
    lines += _table((*loads, "wasted_share", "mean_batch"), record["simulated"])
    lines += ["", verdict("simulated", record["simulated"]), ""]
    lines += ["Recompute or swap at a load of 1.5 (counts real, seconds modelled):", ""]
    keys = ("block_size", "answer", "preemptions", "wasted_share", "blocks_moved", "transfers",
            "goodput_tokens_per_s", "latency_p99_s")  # fmt: skip
    lines += _table(keys, record["answers"])
    lines += ["", "Bringing one sequence back, modelled milliseconds:", ""]
    lines += _table(tuple(record["swap_or_recompute"][0]), record["swap_or_recompute"])
    lines += ["", "Prompts that share 512 tokens, at 1.25 of the capacity without sharing:", ""]
    keys = ("prefix_cache", "goodput_tokens_per_s", "ttft_p99_s", "latency_p99_s", "preemptions",
            "prefix_hit_tokens")  # fmt: skip
    lines += _table(keys, record["prefix_cache"])
    if record["live"]:
        lines += ["", "Measured: the real engine on a small pool of this machine:", ""]
        lines += [*_table(loads, record["live"]), "", verdict("measured", record["live"])]
    return lines


def verdict(kind: str, rows: list[dict[str, Any]]) -> str:
    """Goodput past capacity over that at capacity."""
    by_load = {row["load"]: row["goodput_tokens_per_s"] for row in rows}
    if 1.0 not in by_load or 1.5 not in by_load:
        return f"Goodput by load, {kind}: {by_load}"
    share = by_load[1.5] / by_load[1.0]
    word = "no collapse" if share >= 0.9 else "COLLAPSE"
    return f"Goodput at 1.5x load is {share:.0%} of that at 1.0x ({kind}): {word}."


def picture(record: dict[str, Any]) -> str:
    """Goodput over that at the lowest load's rate, so that both machines fit one chart."""
    series: list[Series] = []
    for name in ("simulated", "live"):
        rows = record[name]
        top = max((row["goodput_tokens_per_s"] for row in rows), default=0.0)
        if top:
            points = [(r["load"], 100 * r["goodput_tokens_per_s"] / top) for r in rows]
            word = "modelled" if name == "simulated" else "measured"
            series.append(Series(f"goodput, {word}", points, name == "simulated", 0))
            worst = max(row["latency_p99_s"] for row in rows)
            points = [(r["load"], 100 * r["latency_p99_s"] / worst) for r in rows]
            series.append(Series(f"p99 latency, {word}", points, name == "simulated", 1))
    axes = Axes("Past capacity: goodput and 99th latency", "load over capacity", "% of the largest")
    return line_chart(axes, series)


def _table(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> list[str]:
    return table(keys, [[row[key] for key in keys] for row in rows])


if __name__ == "__main__":
    main()
