"""Write a directory aside and put it in place as the last step, so that no half of it ever shows.

A directory that is there already keeps its place, and only what it holds changes: it may be a
mount point, a shell may stand in it, and nothing beside it need be writable.

    destination is new      written in .NAME.x.unfinished/new beside it, which becomes it
    destination is there    written in .NAME.x.unfinished/new inside it, whose files then move up

The directory aside is locked while its process lives; one without a lock is from a killed process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpage.errors import CheckpointError
from jaxpage.reading import reason

MARK = "config.json"
"""Without it a directory is no model: it is taken away first and put there last."""
_LONGEST_NAME = 48
_NO_CONTENT = frozenset(("lost+found",))  # what a new disk holds


@contextmanager
def atomic_directory(
    destination: Path, *, overwrite: bool, tell: Callable[[str], None]
) -> Iterator[Path]:
    """An empty directory that becomes `destination` when the block ends well, else vanishes.

    Links are followed, missing parents made. CheckpointError before the block for what can't be
    put in place later: a destination that can't be written, that another conversion is writing, or
    that holds something. Only a model directory may be replaced, so that a slip of the keyboard
    doesn't cost a home directory. `tell` gets a line about leftovers.
    """
    made: list[Path] = []
    try:
        with _refused(destination):
            destination = destination.resolve()
            made = _missing(destination.parent)
            destination.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(destination) as aside:
            with _refused(destination):
                _clear(aside, destination, tell)
                _check(aside, destination, overwrite=overwrite)
                (aside / "new").mkdir()
            yield aside / "new"
            _put_in_place(aside, destination)
    finally:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def _refused(destination: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte
        raise CheckpointError(
            f"got destination {destination} that can't be written ({reason(error)}), wanted a new "
            "directory in a place that can; choose another"
        ) from None


def _missing(directory: Path) -> list[Path]:
    """The directories that have to be made for this one, itself first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


@contextmanager
def _claimed(destination: Path) -> Iterator[Path]:
    """The locked directory where `destination` is written, the same in every process."""
    digest = hashlib.sha256(os.fsencode(destination)).hexdigest()[:12]
    name = f".{destination.name[:_LONGEST_NAME]}.{digest}.unfinished"
    with _refused(destination):
        aside = (destination if destination.is_dir() else destination.parent) / name
        lock = _lock(aside)
        while not _is_open(aside, lock):  # another process removed it in between
            os.close(lock)
            lock = _lock(aside)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _lock(aside: Path) -> int:
    """Makes a directory, if it isn't there, and locks it; a descriptor to close."""
    aside.mkdir(exist_ok=True)
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network disks have no locks; there an empty directory counts as free.
        if isinstance(error, BlockingIOError) or any(aside.iterdir()):
            os.close(lock)
            raise CheckpointError(
                f"got a destination that another conversion is writing in {aside}, wanted one to "
                "itself; wait for it, or choose another"
            ) from None
    return lock


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _clear(aside: Path, destination: Path, tell: Callable[[str], None]) -> None:
    """Removes what killed conversions left aside, after giving back what one had taken away."""
    if any(aside.iterdir()):
        _give_back(aside, destination)
        for path in aside.iterdir():
            _remove(path)
        tell(f"removed {aside}, which a conversion that was killed had left")
    for path in _beside(aside, destination):
        os.close(_lock(path))
        if (path / "old").exists() and not destination.exists():
            (path / "old").rename(destination)
        _remove(path)
        tell(f"removed {path}, which a conversion that was killed had left")


def _beside(aside: Path, destination: Path) -> list[Path]:
    """What was left when the destination was not there yet, or by versions that used mkdtemp."""
    if not os.access(destination.parent, os.R_OK):
        return []
    name = re.compile(rf"\.{re.escape(destination.name)}\.[a-z0-9_]{{8}}\.unfinished")
    return [
        path
        for path in destination.parent.iterdir()
        if (path.name == aside.name or name.fullmatch(path.name))
        and path != aside
        and path.is_dir()
        and not path.is_symlink()
    ]


def _check(aside: Path, destination: Path, *, overwrite: bool) -> None:
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError(
            f"got the file {destination} as destination, wanted a new directory; choose another"
        )
    if not _content(destination, aside):
        return
    if not overwrite:
        raise CheckpointError(
            f"got destination {destination} that exists, wanted a new directory; "
            "choose another or add --overwrite"
        )
    if not (destination / MARK).exists():
        raise CheckpointError(
            f"got --overwrite for {destination}, which holds no model (no {MARK}), wanted a "
            "directory that convert wrote; choose another"
        )


def _put_in_place(aside: Path, destination: Path) -> None:
    """The renames at the end; a kill between two of them is mended by the next conversion.

    taken/   fills with what was there, the mark first: no model is there from here on
    old/     is taken/ when it is whole: what is in the destination now is new
    new/     empties into the destination, the mark last
    """
    assert (aside / "new" / MARK).exists(), "what was written is no model"
    if aside.parent != destination:
        (aside / "new").rename(destination)
        return
    try:
        (aside / "taken").mkdir()
        for path in _content(destination, aside):
            path.rename(aside / "taken" / path.name)
        (aside / "taken").rename(aside / "old")
        for path in reversed(_content(aside / "new")):
            path.rename(destination / path.name)
    finally:
        _give_back(aside, destination)


def _give_back(aside: Path, destination: Path) -> None:
    """Undoes an unfinished `_put_in_place`, wherever it stopped."""
    if aside.parent != destination or (destination / MARK).exists():
        return
    if (aside / "old").exists():
        for path in _content(destination, aside):
            _remove(path)
    for name in ("old", "taken"):
        if (aside / name).exists():
            for path in reversed(_content(aside / name)):
                path.rename(destination / path.name)


def _content(directory: Path, aside: Path | None = None) -> list[Path]:
    """What a directory holds, the mark first; without what lies aside in it."""
    found = [path for path in directory.iterdir() if path != aside and path.name not in _NO_CONTENT]
    return sorted(found, key=lambda path: path.name != MARK)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
