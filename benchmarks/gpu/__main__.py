"""Verifies the kernels on this machine's device against the oracle, then times them.

    python -m benchmarks.gpu            on a card, under five minutes
    python -m benchmarks.gpu --quick    scaled down, on any machine (interpreted on a CPU)

Needs JAX alone; the decode step is left out where flax is missing, and so is every peer that is not
there (cuDNN's paged and dense attention, Transformers' generate), each with a line that says so.
Writes one JSON and one picture. A wrong result ends it with status 1, before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from typing import Any

import jax

from benchmarks.common.report import first_line, save
from benchmarks.gpu.kernels import Sizes, decode_rows, device_rates, prefill_rows
from benchmarks.gpu.verify import verify_kernels

BUDGET_S = 270.0


def main() -> int:
    """1 when a kernel disagrees with the oracle."""
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one repetition")
    sizes = Sizes.quick() if parser.parse_args().quick else Sizes()
    # PyTorch shares the card: JAX would take three quarters of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    record: dict[str, Any] = {"device": device.device_kind, "quick": sizes.is_quick}

    record["verified"] = verify_kernels(sizes) + _verify_step(sizes)
    for row in record["verified"]:
        print(_verified_line(row))
    is_right = all(row.get("ok", True) for row in record["verified"])
    if is_right:
        record |= _timed(sizes, math.inf if sizes.is_quick else start + BUDGET_S)
        for row in _timed_rows(record):
            print(_line(row))
            for peer, found in row.get("peers", {}).items():
                print(_peer_line(peer, found))
    record["seconds"] = time.perf_counter() - start
    print(f"{record['seconds']:.0f} s")
    pictures = {"": _picture(record)} if is_right else {}
    save("gpu", record, pictures=pictures, is_quick=sizes.is_quick)
    return 0 if is_right else 1


def _timed(sizes: Sizes, deadline: float) -> dict[str, Any]:
    """The part of the record that is measured in seconds."""
    rates = device_rates(sizes)
    print(f"copy {rates['copy'] / 1e9:.1f} GB/s, matmul {rates['matmul'] / 1e12:.3f} Tflop/s")
    return {
        "rates": rates,
        "step": _time_step(sizes, rates["copy"]),
        "decode": decode_rows(sizes, rates["copy"], deadline),
        "prefill": prefill_rows(sizes, rates["matmul"], deadline),
    }


def _verify_step(sizes: Sizes) -> list[dict[str, Any]]:
    """A whole decode step against the oracle, where the engine's packages are."""
    case = {"case": "whole step"}
    if importlib.util.find_spec("flax") is None:
        return [case | {"skipped": "flax is not installed"}]
    from benchmarks.gpu.step import verify_step

    return [case | verify_step(sizes)]


def _time_step(sizes: Sizes, copy_rate: float) -> dict[str, Any]:
    if importlib.util.find_spec("flax") is None:
        return {"case": "whole step", "skipped": "flax is not installed"}
    from benchmarks.gpu.step import time_step

    return time_step(sizes, copy_rate)


def _timed_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [record["step"], *record["decode"], *record["prefill"]]


def _verified_line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['case']:44} skipped: {row['skipped']}"
    verdict = "ok" if row["ok"] else "WRONG"
    return f"{row['case']:44} error {row['error']:.1e} of {row['tolerance']:.0e}  {verdict}"


def _line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['case']:44} skipped: {row['skipped']}"
    return f"{row['case']:44} {row['us']:10.0f} us {row['share']:6.1%} of {row['of']}"


def _peer_line(peer: str, found: dict[str, Any]) -> str:
    if "missing" in found:
        return f"    {peer:40} missing: {found['missing']}"
    return f"    {peer:40} {found['us']:10.0f} us {found['share']:6.1%}"


def _picture(record: dict[str, Any]) -> str:
    """Bars of the share of measured bandwidth and matmul rate, peers in grey below, as SVG."""
    bars = []
    for row in _timed_rows(record):
        if "share" in row:
            colour = "#3b7dd8" if row["of"] == "copy" else "#d8803b"
            bars.append((row["case"], row["share"], colour))
            peers = row.get("peers", {}).items()
            bars += [(f". {name}", p["share"], "#999") for name, p in peers if "share" in p]
    height = 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height * len(bars) + 40}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="18" font-size="13">{record["device"]}: share of what a copy or a matmul '
        "reaches</text>",
    ]
    for index, (label, share, colour) in enumerate(bars):
        y = 30 + height * index
        width = 400 * min(share, 1.1)
        parts += [
            f'<text x="8" y="{y + 12}">{label}</text>',
            f'<rect x="270" y="{y + 2}" width="{width:.1f}" height="13" fill="{colour}"/>',
            f'<text x="{275 + width:.1f}" y="{y + 12}">{share:.0%}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
