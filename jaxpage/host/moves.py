"""Block copies that the plan being made will carry, and what must not happen to them until then.

Knows block ids only. All moves of one plan run before its step, in three groups: swap out, swap
in, copies; each group reads all before it writes any. So, in any order of calls between two
`take`s:

    copy 5 -> 8, then copy 8 -> 9           becomes 5 -> 9: 8 is not written when 9 is read
    copy 5 -> 8, then 8 goes to host 0      becomes 5 -> 0: swaps run before copies
    copy 5 -> 8, then 8 is freed            no copy: 8 may be written for another sequence
    copy 5 -> 8                             5 is pinned: swapped-in content may not land in it
    host 0 -> 6                             host 0 is not reused before the plan is made
    host 0 -> 6, then 6 goes to the host    no move out: it waits in host 0 again
"""

from __future__ import annotations

from jaxpage.host.plan import BlockMoves


class PendingMoves:
    """Moves by the block they write: none is written twice."""

    def __init__(self) -> None:
        self._swap_out: dict[int, int] = {}  # host block: device block
        self._swap_in: dict[int, int] = {}  # device block: host block
        self._copies: dict[int, int] = {}  # destination: source

    def host_source(self, block: int) -> int | None:
        """The host block whose content the plan brings into this block, if it does."""
        return self._swap_in.get(self._copies.get(block, block))

    def swap_out(self, block: int, host_block: int) -> None:
        source = self._copies.get(block, block)
        assert source not in self._swap_in, f"block {source} came in with this plan"
        assert host_block not in self._swap_out, f"host block {host_block} is written twice"
        self._swap_out[host_block] = source

    def swap_in(self, host_block: int, block: int) -> None:
        assert block not in self._swap_in, f"block {block} is written twice"
        self._swap_in[block] = host_block

    def copy(self, source: int, destination: int) -> int:
        """Returns the block that will really be read: it is pinned until `take`."""
        assert destination not in self._copies, f"block {destination} is written twice"
        source = self._copies.get(source, source)
        self._copies[destination] = source
        return source

    def cancel_into(self, block: int) -> int | None:
        """Drops the moves into a device block that is freed; returns the source of a copy."""
        if self._swap_in:
            self._swap_in.pop(block, None)
        return self._copies.pop(block, None) if self._copies else None

    def cancel_into_host(self, host_block: int) -> None:
        """Drops the move into a host block that is freed."""
        self._swap_out.pop(host_block, None)

    @property
    def pinned(self) -> tuple[int, ...]:
        """The sources of copies, one entry a copy: they must not be written before `take`."""
        return tuple(self._copies.values())

    def take(self) -> BlockMoves:
        """All moves, in call order; none is pending any more."""
        moves = BlockMoves(
            swap_out=tuple((block, host) for host, block in self._swap_out.items()),
            swap_in=tuple((host, block) for block, host in self._swap_in.items()),
            copies=tuple((source, block) for block, source in self._copies.items()),
        )
        self._swap_out.clear()
        self._swap_in.clear()
        self._copies.clear()
        return moves
