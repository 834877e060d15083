"""Any order of operations: integrity holds after each, and every table shows what was written."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.checks.block_model import BlockModel
from jaxpage.config import CacheConfig
from jaxpage.host.block_manager import BlockManager
from jaxpage.host.prefix_cache import HashTokens, hash_tokens

TOKENS = st.integers(0, 1)  # two ids: prompts often begin alike


def constant_hash(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """Every chain clashes with every other."""
    return 0


class BlockMachine(RuleBasedStateMachine):
    """Adds, appends, forks, ends, swaps, evicts and resets, also in the middle of a plan."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from((1, 2, 3, 4)),
        num_swap_blocks=st.integers(0, 8),
        caching=st.sampled_from((True, True, True, False)),
        hash_block=st.sampled_from((hash_tokens, constant_hash)),
    )
    def start(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int,
        caching: bool,
        hash_block: HashTokens,
    ) -> None:
        config = CacheConfig(num_blocks, block_size, num_swap_blocks)
        blocks = BlockManager(config, enable_prefix_caching=caching, hash_tokens=hash_block)
        self.model = BlockModel(config, blocks)

    @rule(
        token_ids=st.lists(TOKENS, min_size=1, max_size=12),
        salt=st.sampled_from((None, None, "x")),
        room=st.booleans(),
    )
    def open(self, token_ids: list[int], salt: str | None, room: bool) -> None:
        self.model.open(token_ids, salt, len(token_ids) if room else 1)

    @rule(data=st.data(), new_tokens=st.lists(TOKENS, max_size=5))
    def plan_row(self, data: st.DataObject, new_tokens: list[int]) -> None:
        if self.model.running:
            self.model.plan_row(data.draw(st.sampled_from(list(self.model.running))), new_tokens)

    @rule(data=st.data(), num_unknown=st.integers(0, 1))
    def plan_all(self, data: st.DataObject, num_unknown: int) -> None:
        for seq_id in self.model.running:
            self.model.plan_row(seq_id, [data.draw(TOKENS)])
        self.model.dispatch(num_unknown=num_unknown)

    @rule(num_unknown=st.integers(0, 1))
    def dispatch(self, num_unknown: int) -> None:
        self.model.dispatch(num_unknown=num_unknown)

    @rule()
    def read(self) -> None:
        self.model.read()

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.model.running:
            self.model.fork(data.draw(st.sampled_from(list(self.model.running))))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.model.running:
            self.model.release(data.draw(st.sampled_from(list(self.model.running))))

    @rule(data=st.data(), hold=st.booleans())
    def swap_out(self, data: st.DataObject, hold: bool) -> None:
        if self.model.running:
            self.model.swap_out(data.draw(groups(self.model.running)), hold=hold)

    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        if self.model.swapped:
            self.model.swap_in(data.draw(groups(self.model.swapped)))

    @rule(data=st.data())
    def drop_swapped(self, data: st.DataObject) -> None:
        if self.model.swapped:
            self.model.drop_swapped(data.draw(st.sampled_from(list(self.model.swapped))))

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "model"):
            self.model.blocks.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.end()


def groups(sequences: Iterable[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(list(sequences)), min_size=1, max_size=4, unique=True)


BlockMachine.TestCase.settings = settings(stateful_step_count=40)
TestBlocks = BlockMachine.TestCase
