"""Where a decode step's time goes: attention against matrix products, by batch and context.

    python -m benchmarks.speed.breakdown                       the device at hand, minutes
    python -m benchmarks.speed.breakdown --batches 1 16        fewer
    python -m benchmarks.speed.breakdown --attention native    another backend
    python -m benchmarks.speed.breakdown --quick               a small model, seconds

Measured by leaving parts out of the compiled step; beside it the roofline's prediction for this
machine (its own measured limits) and, modelled only, for 7B and 13B models on three cards.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common.report import first_line, save, table
from benchmarks.common.svg import Axes, Series, line_chart
from benchmarks.sim.cost import A10G, A100, H200, LLAMA_7B, LLAMA_13B, Card, Shape
from benchmarks.speed.ablation import PARTS, Bench, step_costs
from benchmarks.speed.host_overhead import Load, scheduler_step_seconds
from benchmarks.speed.roofline import matmul_weights, measure_floors
from jaxpage.backends import as_backend, default_backend
from jaxpage.checkpoint import load
from jaxpage.config import ModelConfig
from jaxpage.device.huge_pages import use_huge_pages

BATCHES = (1, 4, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 4096)
HOST_STEPS = 60
MOST_TOKENS = 36_000
"""Of batch x context: larger pools do not fit beside everything else on a small machine."""


def main() -> None:
    args = _arguments()
    config, params, _ = load(args.model, dtype=args.dtype)
    if args.quick:
        batches, contexts, rounds = [2], [16, 48], 1
    else:
        batches, contexts, rounds = args.batches, args.contexts, args.rounds
    if moving := use_huge_pages(params):  # as the engine does
        moving.join()
    bench = Bench(config, params, as_backend(args.attention))
    floors = measure_floors(quick=args.quick)
    here = this_machine(floors)
    shape, itemsize = shape_of(config), jnp.dtype(config.dtype).itemsize
    cells: list[dict[str, Any]] = []
    for rows in batches:
        fitting = [c for c in contexts if c * rows <= MOST_TOKENS]
        host_ms = 1e3 * statistics.median(scheduler_step_seconds(Load(rows), HOST_STEPS))
        for context, parts in step_costs(bench, rows, fitting, rounds).items():
            parts["host"] = host_ms
            cell = {"rows": rows, "context": context, "ms": parts}
            cell["attention_share"] = parts["attention"] / parts["step"]
            attention, products = part_seconds(here, shape, rows, context, itemsize=itemsize)
            cell["predicted_share"] = attention / (attention + products)
            cell["floor_ms"] = 1e3 * (attention + products)
            cells.append(cell)
            print(f"{rows} rows at {context}: {parts['step']:.1f} ms", flush=True)
    record = {
        "model": str(args.model), "dtype": config.dtype, "attention": args.attention,
        "rounds": rounds, "floors": floors, "measured": cells, "modelled": modelled(),
    }  # fmt: skip
    save(
        f"breakdown_{args.attention}", record, lines=report_lines(record),
        pictures=pictures(record), is_quick=args.quick, keep=args.keep,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    best, _ = default_backend(jax.default_backend())
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default=best, help="the backend")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    return parser.parse_args()


def this_machine(floors: dict[str, float]) -> Card:
    """The device at hand as the roofline sees it: limits just measured."""
    return Card("this machine", floors["bytes_per_s"], floors["flops_per_s"], 0, 1, 0, "measured")


def shape_of(config: ModelConfig) -> Shape:
    return Shape(
        "measured model", matmul_weights(config), config.num_layers,
        config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim,
    )  # fmt: skip


def part_seconds(
    card: Card, shape: Shape, rows: int, context: int, *, itemsize: int = 2
) -> tuple[float, float]:
    """Roofline seconds of (attention, all matrix products) of one decode step."""
    kv = rows * context * shape.kv_bytes * itemsize / 2
    attention = max(
        kv / card.bytes_per_s, 4 * shape.layers * shape.width * rows * context / card.flops_per_s
    )
    weights = shape.parameters * itemsize
    products = max(weights / card.bytes_per_s, 2 * shape.parameters * rows / card.flops_per_s)
    return attention, products


def modelled() -> list[dict[str, Any]]:
    """Attention's share by roofline, 16-bit weights and KV."""
    found: list[dict[str, Any]] = []
    for shape, card, rows, context in product(
        (LLAMA_7B, LLAMA_13B), (A10G, A100, H200), BATCHES, CONTEXTS
    ):
        attention, products = part_seconds(card, shape, rows, context)
        room = 0.9 * card.memory_bytes - shape.weight_bytes
        found.append({
            "model": shape.name, "card": card.name, "rows": rows, "context": context,
            "attention_ms": attention * 1e3, "products_ms": products * 1e3,
            "share": attention / (attention + products),
            "fits": rows * context * shape.kv_bytes <= room,
        })  # fmt: skip
    return found


def report_lines(record: dict[str, Any]) -> list[str]:
    """Measured by part, then the modelled shares."""
    lines = [
        "Measured, ms a decode step "
        f"({record['model']}, {record['dtype']}, backend {record['attention']}; "
        "the host's part hides under the device's; "
        "floor: this machine's roofline, "
        f"{record['floors']['bytes_per_s'] / 1e9:.1f} GB/s of reads and "
        f"{record['floors']['flops_per_s'] / 1e9:.0f} GFLOP/s of float32 products):", "",
    ]  # fmt: skip
    rows = [
        (
            cell["rows"], cell["context"], *(cell["ms"][part] for part in PARTS),
            cell["ms"]["step"], cell["floor_ms"], f"{cell['ms']['step'] / cell['floor_ms']:.2f}",
            f"{cell['attention_share']:.0%}", f"{cell['predicted_share']:.0%}",
        )
        for cell in record["measured"]
    ]  # fmt: skip
    header = (
        "rows", "context", *PARTS, "step", "floor", "step / floor", "attention's share",
        "roofline's",
    )  # fmt: skip
    lines += table(header, rows)
    lines += [
        "",
        "Modelled (roofline), attention's share of a step; - where the KV does not fit:",
        "",
    ]
    keys = sorted({(c["model"], c["card"]) for c in record["modelled"]})
    places = [(b, c) for b in BATCHES for c in CONTEXTS if b in (1, 16, 64) and c != 512]
    by_place = {
        (c["model"], c["card"], c["rows"], c["context"]): f"{c['share']:.0%}" if c["fits"] else "-"
        for c in record["modelled"]
    }
    lines += table(
        ("model", "card", *(f"{b} x {c}" for b, c in places)),
        [(m, card, *(by_place[m, card, b, c] for b, c in places)) for m, card in keys],
    )
    return [*lines, "", answer(record)]


def answer(record: dict[str, Any]) -> str:
    """The question's answer in one sentence."""
    most = max(record["measured"], key=lambda c: c["rows"] * c["context"])
    least = min(record["measured"], key=lambda c: c["rows"] * c["context"])
    return (
        f"Attention takes {least['attention_share']:.0%} of a step at {least['rows']} x "
        f"{least['context']} and {most['attention_share']:.0%} at {most['rows']} x "
        f"{most['context']} on this machine (roofline {least['predicted_share']:.0%} and "
        f"{most['predicted_share']:.0%}); the two meet where batch x context x KV bytes a token "
        "equals the bytes of the weights, "
        f"{LLAMA_13B.weight_bytes / LLAMA_13B.kv_bytes:,.0f} tokens in flight for LLaMA-13B "
        f"and {LLAMA_7B.weight_bytes / LLAMA_7B.kv_bytes:,.0f} for LLaMA-7B (modelled)."
    )


def pictures(record: dict[str, Any]) -> dict[str, str]:
    series: list[Series] = []
    for colour, rows in enumerate(sorted({cell["rows"] for cell in record["measured"]})):
        cells = [cell for cell in record["measured"] if cell["rows"] == rows]
        for name, key in (("measured", "attention_share"), ("roofline", "predicted_share")):
            points = [(cell["context"], 100 * max(cell[key], 0.0)) for cell in cells]
            series.append(Series(f"{rows} rows, {name}", points, name == "roofline", colour))
    axes = Axes(
        f"Attention's share of a decode step ({record['attention']} backend)",
        "context, tokens", "% of the step", log_x=True,
    )  # fmt: skip
    return {"": line_chart(axes, series)}


if __name__ == "__main__":
    main()
