"""A buddy allocator over token slots: how the paper models Orca's reservations."""

from __future__ import annotations


class Buddy:
    """Chunks of powers of two out of `size` slots; a size that is none is cut into such."""

    def __init__(self, size: int) -> None:
        self._free: dict[int, set[int]] = {}
        self._tops: dict[int, int] = {}  # start of a top chunk: its size
        start = 0
        for bit in reversed(range(size.bit_length())):
            if size >> bit & 1:
                self._free.setdefault(1 << bit, set()).add(start)
                self._tops[start] = 1 << bit
                start += 1 << bit
        self._order = sorted(1 << bit for bit in range(size.bit_length()))

    def try_take(self, size: int) -> tuple[int, int] | None:
        """(start, chunk size) of the smallest chunk that holds `size` slots, or None."""
        wanted = chunk_of(size)
        for have in self._order:
            if have >= wanted and self._free.get(have):
                start = min(self._free[have])
                self._free[have].remove(start)
                while have > wanted:
                    have //= 2
                    self._free.setdefault(have, set()).add(start + have)
                return start, wanted
        return None

    def give_back(self, start: int, size: int) -> None:
        """Frees a chunk and joins it with its buddy as far as it goes."""
        top = max(each for each in self._tops if each <= start)
        while size < self._tops[top]:
            buddy = top + ((start - top) ^ size)
            if buddy not in self._free.get(size, ()):
                break
            self._free[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free.setdefault(size, set()).add(start)

    @property
    def num_free(self) -> int:
        return sum(size * len(starts) for size, starts in self._free.items())


def chunk_of(size: int) -> int:
    """The least power of two that is not less."""
    return 1 << (size - 1).bit_length()
