"""Which blocks of the KV pool are free, in use or idle, and how often each is in use.

Knows numbers only: no sequence, no token.

    block     0      1      2      3      4         num_blocks = 4
    holders   null   1      2      0      0         num_used = 2
    state            used   used   idle   free      num_idle = 1: its content is kept while
                                                    nobody needs the room
"""

from __future__ import annotations

from jaxpage.config import NULL_BLOCK


class BlockPool:
    """Reference counts of blocks 1 to num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.num_idle = 0
        self.peak_used = 0
        self._num_holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, NULL_BLOCK, -1))  # taken from the end: low ids first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_idle

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

    def free(self, block: int, *, keep: bool = False) -> bool:
        """One holder less; True: it was the last, and the block is free, or idle with `keep`."""
        holders = self._num_holders
        assert self.num_holders(block), f"block {block} is freed more often than it was taken"
        holders[block] -= 1
        if holders[block]:
            return False
        if keep:
            self.num_idle += 1
        else:
            self._free.append(block)
        return True

    def revive(self, block: int) -> None:
        """An idle block is held once again."""
        assert not self.num_holders(block) and self.num_idle, f"block {block} is not idle"
        self._num_holders[block] = 1
        self.num_idle -= 1
        self.peak_used = max(self.peak_used, self.num_used)

    def recycle(self, block: int) -> None:
        """An idle block is free; what it held is lost."""
        assert not self.num_holders(block) and self.num_idle, f"block {block} is not idle"
        self.num_idle -= 1
        self._free.append(block)

    def num_holders(self, block: int) -> int:
        assert NULL_BLOCK < block <= self.num_blocks, f"no block {block} in 1..{self.num_blocks}"
        return self._num_holders[block]

    def check_integrity(self) -> None:
        """Every block is free, idle or held, never two of them; the null block is none."""
        free = set(self._free)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert NULL_BLOCK not in free and self._num_holders[NULL_BLOCK] == 0, "null block given out"
        num_idle = 0
        for block in range(1, self.num_blocks + 1):
            holders = self._num_holders[block]
            assert holders >= 0, f"block {block} has {holders} holders"
            assert not (block in free and holders), f"block {block} is free with {holders}"
            num_idle += not holders and block not in free
        assert num_idle == self.num_idle, f"{num_idle} blocks without a holder, {self.num_idle=}"
        assert self.num_used <= self.peak_used <= self.num_blocks, (self.num_used, self.peak_used)
