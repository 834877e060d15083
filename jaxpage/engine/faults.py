"""What an exception leaves behind: work cut off in the middle, and faults of single requests.

An interrupt may come between any two instructions, an error from any call. So nothing here tries
to undo: work that must be done as a whole is marked while it is done, and the next call that finds
the mark builds the state anew.
"""

from __future__ import annotations

from collections.abc import Iterable


class StepFault(Exception):
    """A step that can't be run; what the pool held is lost.

    `seq_ids`: the sequences whose requests fail with this text; none if no request is to blame.
    """

    def __init__(self, text: str, seq_ids: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.seq_ids = tuple(seq_ids)


class Whole:
    """`with whole:` marks work while it is done; the mark stays where something was raised."""

    __slots__ = ("is_broken",)

    def __init__(self) -> None:
        self.is_broken = False

    def __enter__(self) -> None:
        self.is_broken = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.is_broken = False


class Retried:
    """`with Retried(whole):` work that is done again from its start after an interrupt.

    An error leaves the mark, because trying again could raise it again.
    """

    __slots__ = ("_whole",)

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._whole.is_broken = True
