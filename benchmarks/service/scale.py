"""From one machine to a fleet: replicas for a daily load, cost, routing, a million requests.

    python -m benchmarks.service.scale           ten minutes; everything in seconds is modelled
    python -m benchmarks.service.scale --quick   a few requests
    ... --keep                           writes to benchmarks/results

The million and the routing comparison step real schedulers. The fleet's search for a rate runs
through a counting twin of the scheduler, which is set beside the real one on the million.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, bar_chart
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE, SITES, Site
from benchmarks.sim.counting import CountingEngine
from benchmarks.sim.lengths import Job
from benchmarks.sim.outcome import percentile
from benchmarks.sim.paged import Engine, Setting, paged

DAILY_REQUESTS = (30_000, 1_000_000, 100_000_000)
PEAK = 2.0
"""The busiest hour's rate over the day's mean."""
TARGET_S = 0.1
"""Mean normalised latency wanted: seconds a token of output, arrival to end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    if args.quick:
        count, per_rate, trace, replicas = 2000, 100, 60, 2
    else:
        count, per_rate, trace, replicas = args.million, 6000, 1500, 4
    million = run_million(count)
    fleet = plan_fleet(per_rate)
    routing = [
        compare_routing(replicas, trace // 2, policy) for policy in ("round robin", "prefix")
    ]
    record = {
        "million": million, "fleet": fleet, "routing": routing, "peak": PEAK,
        "target_s": TARGET_S, "sites": {name: site.constants() for name, site in SITES.items()},
    }  # fmt: skip
    axes = Axes("Cost by model and card, ShareGPT lengths, assumed prices of cards", "",
                "dollars a million output tokens")  # fmt: skip
    bars = f"at {TARGET_S:g} s a token"
    costs = [row["dollars_per_million_tokens"] for row in fleet]
    chart = bar_chart(axes, [row["site"] for row in fleet], [(bars, costs)], modelled=[bars])
    lines = report_lines(record)
    save("scale", record, lines=lines, pictures={"": chart}, is_quick=args.quick, keep=args.keep)


def run_million(count: int) -> dict[str, dict[str, Any]]:
    """Alpaca-like requests, 60 a second, one replica: the real scheduler, then its twin.

    One thread, so that processor seconds are the wall seconds of a machine with nothing else.
    """
    jobs = list(_stream(lengths.alpaca_like(50_000), 60.0, count))
    start, wall = time.process_time(), time.perf_counter()
    real = paged(PAPER_SITE, jobs)
    middle, wall = time.process_time(), time.perf_counter() - wall
    twin = CountingEngine(PAPER_SITE).run(iter(jobs))
    end = time.process_time()
    return {
        "real": {
            "requests": real.num_done, "output_tokens": real.output_tokens,
            "steps": int(real.counters["num_steps"]),
            "preemptions": int(real.counters["preemptions_recompute"]),
            "modelled_s": real.end_s, "mean_latency_s": sum(real.latencies()) / real.num_done,
            "mean_batch": real.meter.mean("batch"), "processor_s": middle - start, "wall_s": wall,
        },
        "twin": {
            "requests": twin.requests, "output_tokens": twin.output_tokens, "steps": twin.steps,
            "preemptions": twin.preemptions, "modelled_s": twin.seconds,
            "mean_latency_s": twin.latency_sum_s / twin.requests, "mean_batch": twin.mean_batch,
            "processor_s": end - middle,
        },
    }  # fmt: skip


def plan_fleet(per_rate: int) -> list[dict[str, Any]]:
    """By card: the rate that one replica holds under TARGET_S, replicas a load, and the cost."""
    pairs = lengths.sharegpt()
    found: list[dict[str, Any]] = []
    for site in SITES.values():
        rate, tokens_per_s = sustained_rate(site, pairs, per_rate)
        found.append({
            "site": site.name,
            "requests_per_s": rate,
            "replicas": {n: math.ceil(n * PEAK / 86_400 / rate) for n in DAILY_REQUESTS},
            "dollars_per_million_tokens":
                site.cost.card.dollars_per_hour / 3600 / tokens_per_s * 1e6,
        })  # fmt: skip
    return found


def sustained_rate(site: Site, pairs: list[tuple[int, int]], count: int) -> tuple[float, float]:
    """(requests, output tokens) a second while the mean normalised latency is under TARGET_S."""
    low, high = 0.05, 400.0
    for _ in range(12):
        rate = math.sqrt(low * high)
        totals = CountingEngine(site).run(_stream(pairs, rate, count))
        mean_output = totals.output_tokens / totals.requests
        is_held = totals.latency_sum_s / totals.requests / mean_output < TARGET_S
        low, high = (rate, high) if is_held else (low, rate)
    return low, low * lengths.mean_lengths(pairs)[1]


def compare_routing(replicas: int, count: int, policy: str) -> dict[str, Any]:
    """Real schedulers behind a router; each request belongs to one of 200 long system prompts.

    `prefix` sends a prompt where its prefix was last sent, unless that replica has twice the mean
    of requests in hand; then, as every new prefix, to the one with the fewest.
    """
    rng, site = random.Random(3), SITES["llama7b_a10g"]
    fleet = [Engine(site, Setting(prefix_caching=True)) for _ in range(replicas)]
    home: dict[int, int] = {}
    clock, pairs = 0.0, lengths.alpaca_like(count, seed=5)
    for number, (prompt, output) in enumerate(pairs):
        clock += rng.expovariate(12.0 * replicas)
        _run_until(fleet, clock)
        tenant = min(int(rng.paretovariate(0.7)) - 1, 199)
        if policy == "round robin":
            chosen = number % replicas
        else:
            chosen = _choose(fleet, home.get(tenant))
            home[tenant] = chosen
        engine = fleet[chosen]
        engine.clock = max(engine.clock, clock)
        engine.add(Job(prompt + 512, output, clock, prefix=512, tenant=tenant))
    _run_until(fleet, math.inf)
    outcomes = [engine.outcome() for engine in fleet]
    waits = [wait for outcome in outcomes for wait in outcome.first_token()]
    prompts = sum(job.prompt for outcome in outcomes for job in outcome.jobs)
    return {
        "policy": policy,
        "replicas": replicas,
        "requests": count,
        "hit_share": sum(o.counters.get("prefix_hit_tokens", 0) for o in outcomes) / prompts,
        "ttft_p50_s": percentile(waits, 0.5),
        "ttft_p99_s": percentile(waits, 0.99),
        "latency_p99_s": percentile([x for o in outcomes for x in o.latencies()], 0.99),
    }


def _choose(fleet: list[Engine], home: int | None) -> int:
    loads = [engine.scheduler.num_running + engine.scheduler.num_waiting for engine in fleet]
    if home is not None and loads[home] <= 2 * sum(loads) / len(loads) + 1:
        return home
    return loads.index(min(loads))


def _run_until(fleet: list[Engine], clock: float) -> None:
    """Steps whoever is behind the clock and has work."""
    for engine in fleet:
        while engine.clock < clock and engine.scheduler.has_unfinished:
            if not engine.step():
                break


def _stream(pairs: list[tuple[int, int]], rate: float, count: int) -> Iterator[Job]:
    rng, now = random.Random(7), 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt, output = pairs[rng.randrange(len(pairs))]
        yield Job(prompt, output, now)


def report_lines(record: dict[str, Any]) -> list[str]:
    real, twin = record["million"]["real"], record["million"]["twin"]
    lines = [
        "Everything in seconds is modelled; processor seconds are measured.",
        "",
        f"{real['requests']:,} requests, {real['output_tokens']:,} output tokens through the real "
        f"scheduler in {real['processor_s'] / 60:.1f} minutes of one processor "
        f"({1e6 * real['processor_s'] / real['output_tokens']:.1f} us a token); "
        f"its counting twin took {twin['processor_s']:.0f} s.",
        "",
    ]
    keys = ("steps", "preemptions", "modelled_s", "mean_latency_s", "mean_batch")
    lines += table(
        ("trace", "steps", "preemptions", "end, s", "mean latency, s", "mean batch"),
        [(name, *(each[key] for key in keys)) for name, each in record["million"].items()],
    )
    lines += [""]
    replicas = [f"replicas at {n:,} a day" for n in DAILY_REQUESTS]
    lines += table(
        ("site", "requests/s held", *replicas, "$ / million tokens"),
        [
            (
                r["site"],
                r["requests_per_s"],
                *r["replicas"].values(),
                r["dollars_per_million_tokens"],
            )
            for r in record["fleet"]
        ],
    )
    lines += [""]
    keys = ("policy", "replicas", "hit_share", "ttft_p50_s", "ttft_p99_s", "latency_p99_s")
    return lines + table(keys, [[row[key] for key in keys] for row in record["routing"]])


if __name__ == "__main__":
    main()
