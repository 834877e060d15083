"""A device that stores, in every slot, all that its KV would hang on; and the books beside it.

Each operation is done to a `BlockManager` and to lists of tokens. Plans run in order, moves first,
as on a device; after each every slot of every table, on the device and on the host, must show what
its sequence wrote there: its salt and all its tokens up to that position. A block handed out twice,
a stale prefix hit, a copy too late or an evicted block found again shows up as a wrong slot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager


class Content(NamedTuple):
    """What a slot's K and V are a function of."""

    params: int
    """Counts resets: KV of older parameters may not be found by newer requests."""
    mark: int
    """Stands for the salt and all tokens up to this one."""


@dataclass
class Model:
    """One sequence as it should be."""

    salt: str | None
    token_ids: list[int]
    marks: list[int]
    """One a token."""
    params: int
    num_stored: int = 0
    last_step: int = 0
    num_planned: int = 0
    """Tokens of its row in the plan being made."""


@dataclass
class BlockModel:
    """A manager, the device it speaks of, and what both should hold."""

    config: CacheConfig
    blocks: BlockManager
    running: dict[int, Model] = field(default_factory=dict)
    swapped: dict[int, Model] = field(default_factory=dict)
    unread: deque[int] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)
    num_done: int = 0
    """Operations that did something."""
    num_steps: int = 0
    num_resets: int = 0
    num_sequences: int = 0
    device: dict[int, Content] = field(default_factory=dict)
    host: dict[int, Content] = field(default_factory=dict)
    _marks: dict[tuple[int | str | None, int], int] = field(default_factory=dict)

    def open(self, token_ids: Seq[int], salt: str | None, num_tokens: int) -> int | None:
        """A new sequence with room for `num_tokens`; None where that does not fit."""
        hit = self.blocks.match(token_ids, () if salt is None else (("salt", salt),))
        assert hit.num_tokens < len(token_ids) and not hit.num_tokens % self.config.block_size
        num_tokens = max(num_tokens, hit.num_tokens + 1)
        free, needed = self.blocks.num_free, self.blocks.num_needed(num_tokens, hit)
        if needed > free:
            return None
        seq_id = self._new_id()
        self.blocks.open(seq_id, num_tokens, hit)
        assert self.blocks.num_free == free - needed, "num_needed is not what open takes"
        model = Model(salt, [], [], self.num_resets, hit.num_tokens)
        self._append(model, token_ids)
        self.running[seq_id] = model
        self._did("open")
        self.counts["open with a hit"] += bool(hit.num_tokens)
        self.counts["hit tokens"] += hit.num_tokens
        return seq_id

    def plan_row(self, seq_id: int, new_tokens: Seq[int]) -> bool:
        """Plans a row of tokens not stored yet and new ones; False where no block is left."""
        model = self.running[seq_id]
        if model.num_planned:
            return True
        num_tokens = len(model.token_ids) - model.num_stored + len(new_tokens)
        free = self.blocks.num_free
        needed = self.blocks.num_blocks_to_write(seq_id, num_tokens)
        if not num_tokens or needed > free:
            return False
        before = self.blocks.table(seq_id)
        if needed:
            self.blocks.prepare_write(seq_id, num_tokens)
        assert self.blocks.num_free == free - needed, "prepare_write took another number"
        assert needed or self.blocks.table(seq_id) is before, "a new table without a new block"
        self._append(model, new_tokens)
        model.num_planned = num_tokens
        self._did("row")
        return True

    def dispatch(self, *, num_unknown: int = 0) -> None:
        """Runs the plan; of every row the last `num_unknown` tokens are not known to the host."""
        self.num_steps += 1
        self._move()
        planned = [seq_id for seq_id, model in self.running.items() if model.num_planned]
        for seq_id in planned:  # a step writes all its rows before it reads
            self._write(self.blocks.table(seq_id), self.running[seq_id])
        self.check_contents()
        for seq_id in planned:
            model = self.running[seq_id]
            known = model.token_ids[: len(model.token_ids) - num_unknown]
            self.blocks.store(seq_id, model.num_stored, known, until_step=self.num_steps)
            model.num_planned, model.last_step = 0, self.num_steps
        self.unread.append(self.num_steps)
        self._did("dispatch")
        self.check_contents()

    def read(self) -> None:
        """The result of the oldest unread step is in."""
        if self.unread:
            self.blocks.step_read(self.unread.popleft())
            self._did("read")

    def fork(self, seq_id: int) -> None:
        """A second table of the same content; not while the parent's row is planned."""
        parent = self.running[seq_id]
        if parent.num_planned:
            return
        free, child = self.blocks.num_free, self._new_id()
        self.blocks.fork(seq_id, child)
        assert self.blocks.num_free == free
        self.running[child] = Model(
            parent.salt,
            parent.token_ids[: parent.num_stored],
            parent.marks[: parent.num_stored],
            parent.params,
            parent.num_stored,
            parent.last_step,
        )
        self._did("fork")

    def release(self, seq_id: int) -> None:
        """Ends or preempts a sequence at any moment."""
        model = self.running.pop(seq_id)
        self.blocks.free(seq_id, until_step=self._until_step((model,)))
        self._did("abort of a planned row" if model.num_planned else "release")

    def swap_out(self, gang: Seq[int], *, hold: bool) -> bool:
        """A gang goes to the host, if there is room."""
        if not gang or not self.blocks.can_swap_out(gang):
            return False
        models = {seq_id: self.running.pop(seq_id) for seq_id in gang}
        until_step = self._until_step(tuple(models.values())) if hold else None
        self.blocks.swap_out(gang, until_step=until_step)
        for seq_id, model in models.items():
            model.num_planned = 0
            self.swapped[seq_id] = model
            assert self.blocks.is_swapped(seq_id)
        self._did("swap out")
        return True

    def swap_in(self, gang: Seq[int]) -> bool:
        """A gang comes back, if there is room."""
        free, needed = self.blocks.num_free, self.blocks.num_needed_to_swap_in(gang)
        if not gang or needed > free:
            return False
        moved = self.blocks.swap_in(gang)
        assert self.blocks.num_free == free - needed and moved <= needed
        for seq_id in gang:
            self.running[seq_id] = self.swapped.pop(seq_id)
        self._did("swap in")
        return True

    def drop_swapped(self, seq_id: int) -> None:
        self.blocks.free_swapped(seq_id)
        del self.swapped[seq_id]
        self._did("abort on the host")

    def reset(self) -> None:
        """New parameters: nothing older may be found."""
        self.blocks.reset_prefix_cache()
        self.num_resets += 1
        assert self.blocks.pool.refs.num_evictable == 0
        self._did("reset")

    def end(self) -> None:
        """Ends everything; the pools are whole again."""
        for seq_id in list(self.running):
            self.release(seq_id)
        for seq_id in list(self.swapped):
            self.drop_swapped(seq_id)
        self.dispatch()
        while self.unread:
            self.read()
        self.blocks.check_integrity()
        assert self.blocks.num_free == self.config.num_blocks, "device blocks are lost"
        assert self.blocks._host.num_free == self.config.num_swap_blocks, "host blocks are lost"
        assert self.blocks.pool.num_slots_in_use == self.blocks.pool.num_slots_allocated == 0

    def check_contents(self) -> None:
        """Every slot of every table shows what was written there. Good once moves have run."""
        slots: set[int] = set()
        for seq_id, model in self.running.items():
            table = self.blocks.table(seq_id)
            assert self.blocks.num_stored(seq_id) in (
                model.num_stored,
                model.num_stored - model.num_planned,
            )
            for position in range(model.num_stored):
                slot = self._slot(table, position)
                slots.add(slot)
                _check(seq_id, position, self.device.get(slot), model)
        if not any(model.num_planned for model in self.running.values()):
            in_use = self.blocks.pool.num_slots_in_use
            assert len(slots) == in_use, "a slot is counted twice, or not"
        for seq_id, model in self.swapped.items():
            table = tuple(swapped.host_block for swapped in self.blocks._host.tables[seq_id].blocks)
            for position in range(model.num_stored):
                slot = self._slot(table, position)
                _check(seq_id, position, self.host.get(slot), model)

    def _did(self, name: str) -> None:
        self.counts[name] += 1
        self.num_done += 1

    def _move(self) -> None:
        """Three groups; each reads all before it writes any, and writes no place twice."""
        moves = self.blocks.take_moves()
        self.counts["blocks out"] += len(moves.swap_out)
        self.counts["blocks in"] += len(moves.swap_in)
        self.counts["copies"] += len(moves.copies)
        for pairs, source, target in (
            (moves.swap_out, self.device, self.host),
            (moves.swap_in, self.host, self.device),
            (moves.copies, self.device, self.device),
        ):
            assert len({into for _, into in pairs}) == len(pairs), f"written twice: {pairs}"
            size = self.config.block_size
            read = [[source.get(out * size + i) for i in range(size)] for out, _ in pairs]
            for (_, into), contents in zip(pairs, read, strict=True):
                for offset, content in enumerate(contents):
                    target.pop(into * size + offset, None)
                    if content is not None:
                        target[into * size + offset] = content

    def _write(self, table: tuple[int, ...], model: Model) -> None:
        for position in range(model.num_stored, model.num_stored + model.num_planned):
            content = Content(self.num_resets, model.marks[position])
            self.device[self._slot(table, position)] = content
        model.num_stored += model.num_planned

    def _append(self, model: Model, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            before = model.marks[-1] if model.marks else model.salt
            mark = self._marks.setdefault((before, token_id), len(self._marks))
            model.token_ids.append(token_id)
            model.marks.append(mark)

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        size = self.config.block_size
        return table[position // size] * size + position % size

    def _until_step(self, models: Seq[Model]) -> int | None:
        last = max(model.last_step for model in models)
        return last if last in self.unread else None

    def _new_id(self) -> int:
        self.num_sequences += 1
        return self.num_sequences


def _check(seq_id: int, position: int, found: Content | None, model: Model) -> None:
    assert found is not None, f"sequence {seq_id} shows nothing at {position}"
    assert found.mark == model.marks[position], f"sequence {seq_id} at {position}: {found}"
    assert found.params >= model.params, f"sequence {seq_id} at {position} is stale: {found}"
