"""Runs readers on damaged files, each in a process that may die, and says what became of them.

An outcome is `read` or `refused`, as promised, or one of four faults. The process is kept for many
inputs, since importing costs seconds, and replaced when it hangs or dies.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from jaxpage.errors import JaxpageError
from tests.fuzz.mutate import mutate
from tests.fuzz.target import Target

FINE = ("read", "refused")
FAULTS = ("traceback", "hang", "memory", "crash")
MOST_SECONDS = 10.0
MOST_GROWTH_BYTES = 1 << 30
MOST_DATA_BYTES = 8 << 30
"""Of the process, so that what asks for everything doesn't take the machine down."""
_MOST_SECONDS_TO_BEGIN, _GRACE_SECONDS = 300.0, 5.0
LONGEST_MESSAGE = 2000
ROOMS = ("tests.fuzz.targets_weights", "tests.fuzz.targets_tokenizers")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one damaged input; target and seed are enough to see it again."""

    target: str
    seed: int
    kind: str
    """One of FINE or FAULTS."""
    detail: str = ""
    seconds: float = 0.0


def all_targets(rooms: Sequence[str] = ROOMS) -> dict[str, Target]:
    """Every target of these modules by its name."""
    found: dict[str, Target] = {}
    for room in rooms:
        if importlib.util.find_spec(room) is not None:
            found |= {target.name: target for target in importlib.import_module(room).TARGETS}
    return found


@dataclass
class Attack:
    """One target's whole files in a directory, damaged and mended in turn."""

    target: Target
    directory: Path
    path: Path = field(init=False)
    whole: dict[Path, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.target.write(self.directory)
        files = (path for name in self.target.mutated for path in self.directory.glob(name))
        self.whole = {path: path.read_bytes() for path in files if path.is_file()}
        assert self.whole, f"{self.target.name} has nothing to damage"
        with warnings.catch_warnings(action="ignore"):
            self.target.read(self.path)

    def run(self, seed: int) -> Outcome:
        """Damages one file by the seed, reads, and mends it."""
        rng = random.Random(f"{self.target.name} {seed}")
        path = rng.choice(sorted(self.whole))
        with _instead(path, mutate(self.whole[path], rng), self.whole[path]):
            began = time.perf_counter()
            kind, detail = self._read()
            seconds = time.perf_counter() - began
        if seconds > MOST_SECONDS:
            kind = "hang"
        return Outcome(self.target.name, seed, kind, f"{path.name}: {detail}", seconds)

    def _read(self) -> tuple[str, str]:
        try:
            with warnings.catch_warnings(action="ignore"):
                self.target.read(self.path)
        except JaxpageError as error:
            text = str(error)
            is_line = "\n" not in text and len(text) <= LONGEST_MESSAGE
            return ("refused" if is_line else "traceback"), text[:LONGEST_MESSAGE]
        except BaseException:  # noqa: BLE001 - whatever else comes is what is looked for
            return "traceback", traceback.format_exc()
        return "read", ""


@contextmanager
def _instead(path: Path, content: bytes, whole: bytes) -> Iterator[None]:
    """Another file by the same name: what is mapped of the old one must not change under it."""
    path.unlink()
    path.write_bytes(content)
    yield
    path.unlink()
    path.write_bytes(whole)


class Worker:
    """A process that runs attacks; replaced when one ends it."""

    def __init__(self, rooms: Sequence[str] = ROOMS) -> None:
        self._rooms = rooms
        self._start()

    def run(self, target: str, seed: int) -> Outcome:
        self._connection.send((target, seed))
        try:
            # Imports and whole files first, which are no fault of the input.
            if self._connection.poll(_MOST_SECONDS_TO_BEGIN):
                self._connection.recv()
                if self._connection.poll(MOST_SECONDS + _GRACE_SECONDS):
                    return self._connection.recv()
            outcome = Outcome(target, seed, "hang", "killed", MOST_SECONDS)
        except (EOFError, ConnectionError):
            outcome = Outcome(target, seed, "crash", "the process died")
        self.close()
        self._start()
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="fuzz-")
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_work, args=(theirs, self._directory, self._rooms), daemon=True
        )
        self._process.start()
        theirs.close()


def run_all(
    jobs: Iterable[tuple[str, int]], *, num_workers: int, rooms: Sequence[str] = ROOMS
) -> Iterator[Outcome]:
    """The outcome of every (target, seed), in order."""
    workers = [Worker(rooms) for _ in range(num_workers)]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def one(job: tuple[str, int]) -> Outcome:
        worker = free.get()
        try:
            return worker.run(*job)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(num_workers) as pool:
            yield from pool.map(one, jobs)
    finally:
        for worker in workers:
            worker.close()


def _work(connection: Connection, directory: str, rooms: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    targets = all_targets(rooms)
    attacks: dict[str, Attack] = {}
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    while True:
        try:
            name, seed = connection.recv()
        except EOFError:
            return
        if name not in attacks:
            place = Path(directory) / name
            place.mkdir()
            attacks[name] = Attack(targets[name], place)
        connection.send("begun")
        before = _peak_bytes(reset=True)
        outcome = attacks[name].run(seed)
        growth = _peak_bytes() - before
        if outcome.kind in FINE and growth > MOST_GROWTH_BYTES:
            detail = f"grew by {growth} bytes; {outcome.detail}"
            outcome = Outcome(name, seed, "memory", detail, outcome.seconds)
        connection.send(outcome)


def _peak_bytes(*, reset: bool = False) -> int:
    """The most memory this process has held, from now on where it is `reset`; 0 without /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
