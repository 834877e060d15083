"""Run as a program: `python -m tests.convert.growth WARM_UP SRC DST [--to hf]` prints how many
bytes of anonymous memory a conversion takes above the imports, which WARM_UP, a small model of
the same kind, brings in."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from convert.__main__ import main


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def growth(arguments: list[str]) -> int:
    """The highest growth seen while converting, looked at every millisecond."""
    before, peak = anonymous_bytes(), 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = main(arguments)
    done.set()
    watcher.join()
    assert code == 0
    return peak - before


if __name__ == "__main__":
    warm_up, source, destination, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        assert main([warm_up, f"{folder}/out", *options]) == 0
    print(growth([source, destination, *options]))
