"""Block sizes 1 to 256: what they waste, share and cost, and where the best one lies.

    python -m benchmarks.speed.block_size            minutes
    python -m benchmarks.speed.block_size --no-model the simulation and the host alone
    python -m benchmarks.speed.block_size --quick    seconds, a small model
    ... --keep                                 writes to benchmarks/results

Counted by the real block manager: tail waste, batch, blocks saved by four samples. Measured here:
the host's time a token, and attention over blocks of each size with the model at hand. The last
column multiplies the two: tokens a second that memory allows, times attention's slowdown at its
share of a step; it is modelled.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, Series, line_chart
from benchmarks.sim import lengths
from benchmarks.sim.cost import PAPER_SITE
from benchmarks.sim.paged import Setting, paged

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ATTENTION_SHARE = 0.3
"""Of a step, for the last column: the roofline's for LLaMA-13B with the pool full (12 of 38 GB)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--attention", default="xla")
    parser.add_argument("--tokens", type=int, default=90_000, help="of output, by simulation")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    sizes = (4, 16, 64) if args.quick else BLOCK_SIZES
    tokens = 4000 if args.quick else args.tokens
    workloads = {"ShareGPT": lengths.sharegpt(), "Alpaca-like": lengths.alpaca_like(3000)}
    counted = [
        count(name, pairs, size, tokens) for name, pairs in workloads.items() for size in sizes
    ]
    kernel: dict[int, float] = {}
    if not args.no_model:
        rows, context = (2, 64) if args.quick else (args.rows, args.context)
        kernel = attention_ms(args.model, args.attention, sizes, rows, context)
    weigh(counted, kernel)
    record = {
        "site": PAPER_SITE.constants(), "tokens": tokens, "counted": counted,
        "attention_ms_a_layer": kernel, "attention": args.attention,
        "rows": args.rows, "context": args.context, "attention_share": ATTENTION_SHARE,
    }  # fmt: skip
    lines, pictures = report_lines(record), {"": picture(record)}
    save("block_size", record, lines=lines, pictures=pictures, is_quick=args.quick, keep=args.keep)


def count(name: str, pairs: list[tuple[int, int]], size: int, tokens: int) -> dict[str, Any]:
    """One workload and block size: memory as counted, the host as measured, time as modelled."""
    setting, requests = Setting(block_size=size), int(tokens / lengths.mean_lengths(pairs)[1])
    jobs = lengths.at_once(pairs, requests)
    start = time.process_time()
    alone = paged(PAPER_SITE, jobs, setting, drained=False)
    host_s = time.process_time() - start
    fours = lengths.at_once(pairs, max(requests // 3, 2), samples=4)
    shared = paged(PAPER_SITE, fours, setting, drained=False).meter.sums
    return {
        "lengths": name,
        "mean_lengths": lengths.mean_of_jobs(jobs),
        "block_size": size,
        "waste_percent": 100 - 100 * alone.meter.ratio("stored", "reserved"),
        "mean_batch": alone.meter.mean("batch"),
        "saved_percent": 100 * shared["saved"] / (shared["saved"] + shared["blocks"]),
        "host_us_per_token": 1e6 * host_s / alone.counters["generated_tokens"],
        "memory_tokens_per_s": alone.meter.mean("tokens_per_s"),
    }


def attention_ms(
    model: str, backend: str, sizes: tuple[int, ...], rows: int, context: int
) -> dict[int, float]:
    """Milliseconds of one layer's attention with the KV write, least of several."""
    import jax
    import jax.numpy as jnp

    from benchmarks.speed.ablation import scattered_step
    from jaxpage.backends import as_backend
    from jaxpage.checkpoint import load
    from jaxpage.device.kv_cache import init_cache

    config, _, _ = load(model, dtype="float32")
    attend = partial(as_backend(backend).attention, spec=config.attention_spec(0))
    run = jax.jit(attend, donate_argnums=3)
    q = jnp.ones((rows, config.num_heads, config.head_dim), jnp.float32)
    k = jnp.ones((rows, config.num_kv_heads, config.head_dim), jnp.float32)
    found: dict[int, float] = {}
    for size in sizes:
        step = jax.device_put(scattered_step(rows, context, context, block_size=size))
        layer = init_cache(config, num_blocks=rows * -(-context // size), block_size=size)[0]
        times: list[float] = []
        for _ in range(12):
            start = time.perf_counter()
            out, layer = run(q, k, k, layer, step)
            jax.block_until_ready(out)
            times.append(time.perf_counter() - start)
        found[size] = 1e3 * min(times[1:])
    return found


def weigh(counted: list[dict[str, Any]], kernel: dict[int, float]) -> None:
    """Adds the estimate that joins memory and kernel: tokens a second over the workload's best."""
    fastest = min(kernel.values()) if kernel else 1.0
    for row in counted:
        slowdown = kernel[row["block_size"]] / fastest if kernel else 1.0
        step = 1 - ATTENTION_SHARE + ATTENTION_SHARE * slowdown
        row["joined_tokens_per_s"] = row["memory_tokens_per_s"] / step
    for name in {row["lengths"] for row in counted}:
        rows = [row for row in counted if row["lengths"] == name]
        best = max(row["joined_tokens_per_s"] for row in rows)
        for row in rows:
            row["joined_share"] = row["joined_tokens_per_s"] / best


def report_lines(record: dict[str, Any]) -> list[str]:
    kernel = record["attention_ms_a_layer"]
    lines: list[str] = []
    header = ("block size", "waste % (counted)", "mean batch (counted)",
              "saved by 4 samples % (counted)", "host us/token (measured)",
              "attention ms/layer (measured)", "tokens/s, memory (modelled)",
              "share of the best (modelled)")  # fmt: skip
    for name in dict.fromkeys(row["lengths"] for row in record["counted"]):
        rows = [row for row in record["counted"] if row["lengths"] == name]
        means = rows[0]["mean_lengths"]
        lines += [f"{name}, mean lengths {means[0]:.0f} in, {means[1]:.0f} out:", ""]
        lines += table(header, [
            (r["block_size"], r["waste_percent"], r["mean_batch"], r["saved_percent"],
             r["host_us_per_token"], kernel.get(r["block_size"], "-"), r["memory_tokens_per_s"],
             f"{r['joined_share']:.0%}")
            for r in rows
        ])  # fmt: skip
        lines += ["", sentence(name, rows), ""]
    return lines


def sentence(name: str, rows: list[dict[str, Any]]) -> str:
    """Where the best lies and why."""
    best = max(rows, key=lambda row: row["joined_share"])
    good = [row["block_size"] for row in rows if row["joined_share"] >= 0.95]
    return (
        f"{name}: best at {best['block_size']}; within 5% of it: {min(good)} to {max(good)}. Small "
        "blocks cost the gather and the host, large ones the tail of every sequence "
        f"({rows[0]['waste_percent']:.1f}% of slots at {rows[0]['block_size']}, "
        f"{rows[-1]['waste_percent']:.1f}% at {rows[-1]['block_size']}) and what samples share."
    )


def picture(record: dict[str, Any]) -> str:
    series: list[Series] = []
    for colour, name in enumerate(dict.fromkeys(row["lengths"] for row in record["counted"])):
        rows = [row for row in record["counted"] if row["lengths"] == name]
        for key, label, is_modelled in (
            ("waste_percent", "waste", False),
            ("joined_share", "tokens/s", True),
        ):
            scale = 100 if key == "joined_share" else 1
            points = [(row["block_size"], scale * row[key]) for row in rows]
            series.append(Series(f"{name}: {label}", points, is_modelled, colour))
    axes = Axes(
        "Block size: waste, and tokens/s over the best", "block size, tokens", "%", log_x=True
    )
    return line_chart(axes, series)


if __name__ == "__main__":
    main()
