"""`python -m jaxpage.generate`: complete prompts from the command line.

Exit codes: 0 done; 1 some request failed or the output could not be written; 2 the call itself
is wrong; 130 interrupted; 141 the reader of stdout went away.
"""

# Ctrl-C is handled before anything that takes a while
from __future__ import annotations

from jaxpage.interrupts import INTERRUPTED, end, interruptible, leave_at_once

if __name__ == "__main__":
    leave_at_once()

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxpage.cli.block_picture import check_picture_name, draw_blocks
from jaxpage.cli.jobs import Job, jobs_from_file, jobs_from_prompts, make_params
from jaxpage.cli.options import build_parser, engine_options, sampling_fields
from jaxpage.cli.writers import InOrder, JsonlWriter, Output, OutputError, TextWriter
from jaxpage.errors import CapacityError, ConfigError, JaxpageError, RequestError
from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpage.engine.llm import LLM

DONE, SOME_FAILED, WRONG_CALL, READER_GONE = 0, 1, 2, 141


def main(argv: list[str] | None = None) -> int:
    """Runs one call and returns its exit code."""
    if sys.stderr is None:  # closed by the caller: messages are not wanted
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    args = build_parser().parse_args(argv)
    try:
        jobs = _read_jobs(args)
        options = engine_options(args)
        if args.block_map is not None:
            check_picture_name(args.block_map)
        with _open_output(args.output) as file:
            return _run(args, jobs, options, file)
    except BrokenPipeError:
        # Buffered output has nowhere to go; keep the interpreter from writing it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except JaxpageError as error:
        _say(f"error: {error}")
        return WRONG_CALL
    except OutputError as error:
        _say(
            f"error: got {error.strerror or error}, wanted to write the results; free space or "
            "write elsewhere with -o"
        )
        return SOME_FAILED
    except OSError as error:
        _say(f"error: got {error}, wanted to run the prompts; check space, permissions and limits")
        return SOME_FAILED


def _run(args: argparse.Namespace, jobs: list[Job], options: dict[str, Any], file: Output) -> int:
    writer = _writer(args, jobs, file)
    ordered = InOrder(writer)
    for index, job in enumerate(jobs):
        if job.error is not None:
            ordered.put(index, RequestOutput.refused(str(index), job.prompt, job.error))
    failed = any(job.error is not None for job in jobs)
    try:
        if not all(job.error for job in jobs):
            llm = _load(args, options)
            if args.block_map is not None:
                llm.engine.block_history = []
            failed |= _complete(args, llm, jobs, ordered, file)
            if args.block_map is not None and llm.engine.block_history:
                draw_blocks(args.block_map, llm.engine.block_history)
            if args.stats:
                _say(json.dumps(llm.stats().to_dict()))
    except KeyboardInterrupt:
        ordered.flush()
        _say("interrupted")
        return INTERRUPTED
    return SOME_FAILED if failed else DONE


def _complete(
    args: argparse.Namespace, llm: LLM, jobs: list[Job], ordered: InOrder, file: Output
) -> bool:
    """Runs every job; returns whether one failed."""
    index_of = _add_all(llm, jobs, ordered)
    failed = len(index_of) < sum(job.error is None for job in jobs)
    llm.expect_requests(len(index_of))
    with interruptible() as check, _progress(args, len(index_of)) as advance:
        if _streams(args, jobs):
            return failed | _stream(llm, jobs[0], ordered, file, check)
        for output in _steps(llm, check):
            failed |= output.error is not None
            ordered.put(index_of[output.request_id], output)
            advance()
    return failed


def _stream(llm: LLM, job: Job, ordered: InOrder, file: Output, check: Callable[[], None]) -> bool:
    """Writes the one completion as it is made; returns whether it failed."""
    error = None
    while llm.engine.has_unfinished:
        check()
        for update in llm.engine.updates():
            error = update.error
            file.write(update.text)
            if update.finished and error is None:
                file.write("\n")
        file.flush()
    if error is not None:
        ordered.put(0, RequestOutput.refused("0", job.prompt, error))
    return error is not None


def _add_all(llm: LLM, jobs: list[Job], ordered: InOrder) -> dict[str, int]:
    """Request id -> place in the input, of those accepted; those refused go to `ordered`."""
    index_of: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.error is not None:
            continue
        try:
            prompt = job.prompt if job.messages is None else llm.chat_prompt(job.messages)
            assert prompt is not None, job
            llm.engine.add_request(str(index), prompt, job.params)
            index_of[str(index)] = index
        except (RequestError, CapacityError, ConfigError) as error:
            ordered.put(index, RequestOutput.refused(str(index), job.prompt, str(error)))
    return index_of


def _steps(llm: LLM, check: Callable[[], None]) -> Iterator[RequestOutput]:
    while llm.engine.has_unfinished:
        check()
        yield from llm.engine.step(only_finished=True)


def _read_jobs(args: argparse.Namespace) -> list[Job]:
    sampling = sampling_fields(args)
    make_params(sampling)
    if args.system is not None and not args.chat:
        raise ConfigError("got --system without --chat, wanted both; add --chat")
    jobs = jobs_from_prompts(args.prompt, sampling, chat=args.chat, system=args.system)
    if args.prompts is not None:
        jobs += jobs_from_file(args.prompts, sampling, chat=args.chat, system=args.system)
    if not jobs:
        raise ConfigError("got no prompt, wanted PROMPT or --prompts FILE; add one")
    return jobs


def _load(args: argparse.Namespace, options: dict[str, Any]) -> LLM:
    import jax

    if args.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif args.device == "gpu":
        _require_gpu()
    from jaxpage.engine.llm import LLM

    def report(name: str, seconds: float) -> None:
        from tqdm import tqdm

        # from another thread, perhaps beside a bar; the program may have come from the disk
        tqdm.write(f"{name}: ready in {seconds:.1f} s", file=sys.stderr)

    start = time.perf_counter()
    llm = LLM(args.model, report=None if args.quiet else report, **options)
    if not args.quiet:
        blocks, size = llm.cache_config.num_blocks, llm.cache_config.block_size
        seconds = time.perf_counter() - start
        _say(f"loaded {args.model} in {seconds:.1f} s; pool of {blocks} blocks of {size} tokens")
    return llm


def _require_gpu() -> None:
    """ConfigError if JAX finds no GPU; if it finds one, it computes there by default."""
    import jax

    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise ConfigError(
            f"got --device gpu, wanted a GPU that JAX can use ({str(error).splitlines()[0]}); "
            'pip install "jaxpage[cuda12]", or use --device cpu'
        ) from None


def _streams(args: argparse.Namespace, jobs: list[Job]) -> bool:
    if args.format != "text" or len(jobs) != 1 or args.no_stream:
        return False
    params = jobs[0].params
    return isinstance(params, SamplingParams) and params.num_sequences == 1


def _writer(args: argparse.Namespace, jobs: list[Job], file: Output) -> JsonlWriter | TextWriter:
    if args.format == "jsonl":
        return JsonlWriter(file)
    return TextWriter(file, with_headers=len(jobs) > 1)


@contextlib.contextmanager
def _open_output(name: str | None) -> Iterator[Output]:
    if name in (None, "-"):
        if sys.stdout is None:
            raise ConfigError("got a closed standard output, wanted it open; or give -o FILE")
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack some characters
            sys.stdout.reconfigure(errors="replace")
        yield Output(sys.stdout)
        return
    try:
        file = open(name, "w", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(
            f"got -o {name}, which can't be written ({error.strerror}), wanted a file; "
            "choose another"
        ) from None
    with contextlib.closing(Output(file)) as output:
        yield output


@contextlib.contextmanager
def _progress(args: argparse.Namespace, total: int) -> Iterator:
    if args.quiet or total < 2:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="request", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    end(main())
