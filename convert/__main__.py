"""`python -m convert SRC DST`: the command line of the converter."""

# Ctrl-C is handled before anything that takes a while
from __future__ import annotations

from jaxpage.interrupts import INTERRUPTED, end, interruptible, leave_at_once

if __name__ == "__main__":
    leave_at_once()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxpage.config import DTYPES
from jaxpage.errors import JaxpageError

_EPILOG = """examples:
  python -m convert ./Llama-3.2-1B ./llama-1b            a Hugging Face directory
  python -m convert model.gguf ./model --dtype bfloat16  a GGUF file
  python -m convert smollm2-135m ./smollm2               the default model
  python -m convert ./smollm2 ./smollm2-hf --to hf       back to a Hugging Face directory
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the arguments say; returns the exit code: 0, 2 for a mistake, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        messages = _convert(options)
    except JaxpageError as error:
        return _fail(str(error))
    except OSError as error:
        what = error.filename or options.destination
        return _fail(
            f"got {error.strerror or error} at {what}, wanted to read {options.source} and write "
            f"{options.destination}; check space and permissions"
        )
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)
    print(f"wrote {options.destination}", file=sys.stderr)
    return 0


def _convert(options: argparse.Namespace) -> list[str]:
    """Runs the conversion; its imports take a second, which --help and mistakes are spared."""
    from tqdm import tqdm

    from convert.run import Leaves, convert

    with interruptible() as check:

        def progress(leaves: Leaves, total: int) -> Leaves:
            for leaf in tqdm(leaves, total=total, unit="tensor", file=sys.stderr, leave=False):
                check()
                yield leaf

        return convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            to=options.to,
            overwrite=options.overwrite,
            progress=progress,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
        self.exit(_fail(f"got {message}, wanted SRC and DST; see python -m convert --help"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m convert",
        description="Convert a model to an Orbax checkpoint that jaxpage loads, or to Hugging Face "
        "files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face or Meta directory, a .gguf file, a converted directory, "
        "smollm2-135m or a Hub id like org/name",
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="the directory to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="dtype to store; auto keeps the source's, float32 for quantised files",
    )
    parser.add_argument(
        "--to",
        choices=("orbax", "hf"),
        default="orbax",
        help="what to write: an Orbax checkpoint, or a Hugging Face directory (default orbax)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DST when it holds a model already"
    )
    return parser


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    end(main())
