"""Which blocks of the KV pool are free, and how many tables hold each of the others.

Knows numbers only: no sequence, no token.

    block     0      1    2    3    4         num_blocks = 4
    holders   null   1    2    0    0         num_free = 2: blocks 3 and 4
"""

from __future__ import annotations

NULL_BLOCK = 0
"""Where padding reads; never allocated, never counted."""


class BlockPool:
    """Reference counts of blocks 1 to num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._num_holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, NULL_BLOCK, -1))  # taken from the end: low ids first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A free block, now held once. There must be one: callers ask num_free first."""
        assert self._free, f"all {self.num_blocks} blocks are in use"
        block = self._free.pop()
        self._num_holders[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is in use."""
        assert self.num_holders(block), f"block {block} is free, so it cannot be shared"
        self._num_holders[block] += 1

    def free(self, block: int) -> None:
        """One holder less; the last one gives the block back."""
        assert self.num_holders(block), f"block {block} is freed more often than it was taken"
        self._num_holders[block] -= 1
        if not self._num_holders[block]:
            self._free.append(block)

    def num_holders(self, block: int) -> int:
        assert NULL_BLOCK < block <= self.num_blocks, f"no block {block} in 1..{self.num_blocks}"
        return self._num_holders[block]

    def check_integrity(self) -> None:
        """Every block is free or held, never both; the null block is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert NULL_BLOCK not in free and self._num_holders[NULL_BLOCK] == 0, "null block given out"
        for block in range(1, self.num_blocks + 1):
            holders = self._num_holders[block]
            assert holders >= 0, f"block {block} has {holders} holders"
            assert (block in free) == (holders == 0), f"block {block} is free with {holders}"
        assert self.num_used <= self.peak_used <= self.num_blocks, (self.num_used, self.peak_used)
