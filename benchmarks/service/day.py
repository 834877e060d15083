"""A day of service, compressed: sustained arrivals on the real engine, peaks included.

    python -m benchmarks.service.day                  20 minutes at the highest stable rate
    python -m benchmarks.service.day --minutes 2      shorter
    python -m benchmarks.service.day --quick          seconds, a small model
    ... --keep                                       writes to benchmarks/results

30,000 requests a day with peaks of twice that are a rate of 0.35 a second and peaks of 0.7. The
machine's own capacity is measured first; arrivals then run at `SHARE` of it, with peaks at twice
the trough's rate, so that a slow machine sees the same shape. Measured, all of it: nothing may be
lost, no answer of another length, no block missing at the end, no growth of memory.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, Series, line_chart
from benchmarks.service.live import Served, capacity, serve
from benchmarks.sim import lengths
from benchmarks.sim.lengths import Job
from jaxpage import LLM

SHARE = 0.7
"""Mean arrival rate over the measured capacity; peaks then reach 0.93 of it."""
DAILY = 30_000


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    seconds = 2.0 if args.quick else args.minutes * 60
    pairs = short_pairs(args.quick)
    memory = "16MiB" if args.quick else args.kv_memory
    most = 128 if args.quick else 512
    llm = LLM(args.model, dtype="float32", kv_memory=memory, max_num_seqs=16 if args.quick else 32,
              max_model_len=most, seed=0)  # fmt: skip
    rate = capacity(llm, lengths.at_once(pairs, 12 if args.quick else 64))
    jobs = waves(pairs, rate * SHARE, seconds)
    served = serve(llm, jobs)
    record = {
        "capacity_requests_per_s": rate, "share": SHARE, "seconds": served.seconds,
        "mean_lengths": lengths.mean_of_jobs(jobs), "summary": served.summary(),
        "memory_bytes": served.memory_bytes, "free_blocks": served.free_blocks,
        "stats": served.stats,
    }  # fmt: skip
    lines, pictures = report_lines(record), {"": picture(served)}
    save("day", record, lines=lines, pictures=pictures, is_quick=args.quick, keep=args.keep)
    summary = record["summary"]
    if summary["lost"] or summary["errors"] or summary["wrong_lengths"]:
        raise SystemExit(1)


def short_pairs(is_quick: bool) -> list[tuple[int, int]]:
    """Alpaca-like lengths; a handful of tokens for the quick run."""
    if is_quick:
        return [(4 + i % 5, 3 + i % 6) for i in range(12)]
    return [(prompt, min(output, 256)) for prompt, output in lengths.alpaca_like(4000)]


def waves(pairs: list[tuple[int, int]], rate: float, seconds: float) -> list[Job]:
    """Poisson arrivals whose rate swings between 2/3 and 4/3 of the mean, four times a run."""
    rng, now, jobs = random.Random(11), 0.0, []
    most = rate * 4 / 3
    while True:
        now += rng.expovariate(most)
        if now >= seconds and jobs:
            return jobs
        swing = 1 + math.sin(8 * math.pi * now / seconds) / 3
        if rng.random() < rate * swing / most:
            prompt, output = pairs[rng.randrange(len(pairs))]
            jobs.append(Job(prompt, output, now))


def report_lines(record: dict[str, Any]) -> list[str]:
    summary, memory = record["summary"], record["memory_bytes"]
    growth = memory[-1] / memory[len(memory) // 2] - 1 if memory else 0.0
    per_day = summary["requests"] / record["seconds"] * 86_400
    lines = [
        f"Measured: {summary['requests']} requests in {record['seconds']:.0f} s, "
        f"{per_day:,.0f} a day at this rate ({DAILY:,} wanted), capacity "
        f"{record['capacity_requests_per_s']:.2f} a second; lost {summary['lost']}, errors "
        f"{summary['errors']}, wrong lengths {summary['wrong_lengths']}, blocks free before and "
        f"after {record['free_blocks'][0]} and {record['free_blocks'][1]}, peak memory grew "
        f"{growth:.1%} over the second half.",
        "",
    ]
    names = ("ttft", "per_token", "latency")
    rows = [[name, *(summary[f"{name}_p{share}_s"] for share in (50, 90, 99))] for name in names]
    return lines + table(("seconds", "p50", "p90", "p99"), rows)


def picture(served: Served) -> str:
    """Latency by arrival: a drift would rise to the right."""
    done = sorted(served.finish_s)
    group = max(1, len(done) // 40)
    points: list[tuple[float, float]] = []
    for first in range(0, len(done), group):
        part = [(served.jobs[i].arrival_s, served.finish_s[i]) for i in done[first : first + group]]
        waits = sorted(end - start for start, end in part)
        points.append((part[0][0], waits[len(waits) // 2]))
    axes = Axes("Latency over the run, medians of neighbours", "arrival, s", "latency, s")
    return line_chart(axes, [Series("measured", points)])


if __name__ == "__main__":
    main()
