"""Verifies the kernels on this machine's device against the oracle, then times them.

    python -m benchmarks.gpu_check            on a card, under five minutes
    python -m benchmarks.gpu_check --quick    scaled down, on any machine (interpreted on a CPU)

Needs JAX alone; the decode step is left out, with a line that says so, where flax is missing.
Writes one JSON and one picture. A wrong result ends it with status 1, before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from typing import Any

import jax

from benchmarks.gpu_check_parts import (
    Sizes,
    decode_rows,
    device_rates,
    prefill_rows,
    verify_kernels,
)
from benchmarks.report import OUT, first_line, save

BUDGET_S = 270.0


def main() -> int:
    """1 when a kernel disagrees with the oracle."""
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one repetition")
    sizes = Sizes.quick() if parser.parse_args().quick else Sizes()
    deadline = time.perf_counter() + BUDGET_S
    name = "gpu_check" + ("_quick" if sizes.is_quick else "")
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    record: dict[str, Any] = {"device": device.device_kind, "quick": sizes.is_quick}

    record["verified"] = verify_kernels(sizes)
    for row in record["verified"]:
        verdict = "ok" if row["ok"] else "WRONG"
        print(f"{row['case']:44} error {row['error']:.1e} of {row['tolerance']:.0e}  {verdict}")
    record["step"] = _step(sizes)
    is_right = all(row["ok"] for row in record["verified"]) and record["step"].get("ok", True)
    if is_right:
        rates = record["rates"] = device_rates(sizes)
        print(f"copy {rates['copy'] / 1e9:.1f} GB/s, matmul {rates['matmul'] / 1e12:.3f} Tflop/s")
        record["decode"] = decode_rows(sizes, rates["copy"], deadline)
        record["prefill"] = prefill_rows(sizes, rates["matmul"], deadline)
        for row in record["decode"] + record["prefill"]:
            print(_line(row))
        OUT.mkdir(exist_ok=True)
        (OUT / f"{name}.svg").write_text(_picture(record), encoding="utf-8")
    print(f"wrote {save(name, record)}")
    return 0 if is_right else 1


def _step(sizes: Sizes) -> dict[str, Any]:
    """A whole decode step, where the engine's packages are."""
    if importlib.util.find_spec("flax") is None:
        print("decode step: skipped, flax is not installed")
        return {"skipped": "flax is not installed"}
    from benchmarks.gpu_check_step import check_step

    result = check_step(sizes)
    print(
        f"decode step of {result['model']}: error {result['error']:.1e}, "
        f"{result['ms']:.2f} ms at {result['rows']} rows"
    )
    return result


def _line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['case']:44} skipped: {row['skipped']}"
    line = f"{row['case']:44} {row['us']:10.0f} us {row['share']:6.1%} of {row['of']}"
    return line + (f", cuDNN {row['cudnn_us']:.0f} us" if "cudnn_us" in row else "")


def _picture(record: dict[str, Any]) -> str:
    """Bars of the share of measured bandwidth and matmul rate, as SVG."""
    rows = [row for row in record["decode"] + record["prefill"] if "share" in row]
    height = 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height * len(rows) + 40}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="18" font-size="13">{record["device"]}: share of what a copy or a matmul '
        "reaches</text>",
    ]
    for index, row in enumerate(rows):
        y = 30 + height * index
        width = 400 * min(row["share"], 1.1)
        colour = "#3b7dd8" if row["of"] == "copy" else "#d8803b"
        parts += [
            f'<text x="8" y="{y + 12}">{row["case"]}</text>',
            f'<rect x="270" y="{y + 2}" width="{width:.1f}" height="13" fill="{colour}"/>',
            f'<text x="{275 + width:.1f}" y="{y + 12}">{row["share"]:.0%}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
