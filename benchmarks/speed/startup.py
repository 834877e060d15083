"""Time to the first token of the command line, cold and with a warm compilation cache.

    python -m benchmarks.speed.startup    targets: 20 s cold, 6 s warm

A cold run has an empty cache directory. Time runs from starting Python to the first byte of text.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.common.report import first_line, save

COMMAND = [sys.executable, "-u", "-m", "jaxpage.generate", "hi", "--max-tokens", "4"]


def first_token_seconds(cache: str, model: str) -> float:
    """Seconds until the first byte of text."""
    start = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    command = [*COMMAND, "--quiet", "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"error: the command ended with code {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="one warm run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = first_token_seconds(cache, args.model)
        warm = [first_token_seconds(cache, args.model) for _ in range(1 if args.quick else 3)]
    print(f"cold {cold:.1f} s (target 20), warm {', '.join(f'{s:.1f}' for s in warm)} s (target 6)")
    save("startup", {"cold_s": cold, "warm_s": warm}, is_quick=args.quick)


if __name__ == "__main__":
    main()
