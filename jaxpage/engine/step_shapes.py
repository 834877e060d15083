"""The shapes that steps are padded to: what forward programs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.device.ops import Backend
from jaxpage.device.types import StepShape
from jaxpage.host.ladder import Ladder
from jaxpage.host.plan import PlannedRow, StepPlan

SMALLEST_PREFILL_TOKENS = 16
"""The first rung of prefill: below it a step's time is that of reading the weights."""
FEW_DECODE_ROWS = 16
"""The least number of decode rows that mixed steps are compiled for."""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The rungs that steps are padded to: together they bound the number of programs."""

    decode_rows: Ladder
    prefill_tokens: Ladder
    prefill_rows: int
    table_width: int
    mixed_rows: Ladder
    """Decode rows of a mixed step: few rungs, as they multiply those of prefill."""
    has_groups: bool = False
    """Whether decode steps also come in a form that reads shared leading blocks once."""
    has_adapters: bool = False

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        cache: CacheConfig,
        backend: Backend,
        *,
        has_adapters: bool = False,
    ) -> StepShapes:
        tokens = config.max_num_batched_tokens
        rows = config.max_num_seqs
        is_fine = backend.pays_for_padding
        return cls(
            decode_rows=Ladder.gradual(rows) if is_fine else Ladder.doubling(1, rows),
            prefill_tokens=Ladder.doubling(min(SMALLEST_PREFILL_TOKENS, tokens), tokens),
            prefill_rows=min(config.max_prefill_rows, rows),
            table_width=cache.blocks_for(config.max_model_len),
            mixed_rows=Ladder.doubling(min(FEW_DECODE_ROWS, rows), rows),
            has_groups=backend.reads_groups,
            has_adapters=has_adapters,
        )

    def decode(self, num_rows: int, *, with_groups: bool = False) -> StepShape:
        """The shape of a step whose rows have one token each."""
        rows = self.decode_rows.fit(num_rows)
        groups = rows // 2 if with_groups and self.has_groups else 0
        return self._shape(rows, rows, rows, num_single=rows, num_groups=groups)

    def prefill(self, num_tokens: int) -> StepShape:
        """The shape of a step of packed rows, `num_tokens` in all."""
        tokens = self.prefill_tokens.fit(num_tokens)
        draws = self.decode_rows.fit(
            self.prefill_rows
        )  # so that the samplers of decode serve here too
        return self._shape(tokens, self.prefill_rows, draws, num_single=0)

    def mixed(self, num_single: int, num_packed_tokens: int) -> StepShape:
        """The shape of a step of rows of one token, then packed ones."""
        single = self.mixed_rows.fit(num_single)
        rows = single + self.prefill_rows
        tokens = single + self.prefill_tokens.fit(num_packed_tokens)
        return self._shape(tokens, rows, rows, num_single=single)

    def shape_of(self, plan: StepPlan, *, with_groups: bool = False) -> StepShape:
        """The program's shape for a plan; raises AssertionError when no rung holds it."""
        count = plan.num_single
        if count == len(plan.rows):
            shape = self.decode(count, with_groups=with_groups)
        elif (
            plan.num_tokens <= self.prefill_tokens.sizes[-1] and len(plan.rows) <= self.prefill_rows
        ):
            shape = self.prefill(plan.num_tokens)  # few decode rows are short prefill rows
        else:
            num_packed = len(plan.rows) - count
            assert num_packed <= self.prefill_rows, (num_packed, self.prefill_rows)
            shape = self.mixed(count, plan.num_tokens - count)
        num_read = sum(len(tokens_read(row)) for row in plan.rows[count:]) + count
        if num_read > shape.num_draws:
            shape = replace(shape, num_draws=self.decode_rows.fit(num_read))
        return shape

    def num_draws(self, shape: StepShape, count: int) -> int:
        """Rows R of the sampler's program for `count` draws of a step of this shape."""
        is_mixed = 0 < shape.num_single < shape.num_rows
        if count <= shape.num_draws and not is_mixed:
            return shape.num_draws
        return self.decode_rows.fit(count)

    def _shape(
        self, tokens: int, rows: int, draws: int, *, num_single: int, num_groups: int = 0
    ) -> StepShape:
        return StepShape(
            num_tokens=tokens,
            num_rows=rows,
            table_width=self.table_width,
            num_draws=draws,
            num_single=num_single,
            num_groups=num_groups,
            has_adapters=self.has_adapters,
        )


def tokens_read(row: PlannedRow) -> tuple[int, ...]:
    """The tokens of a row that its draws read, from 0 and each once; its last where none does."""
    if not row.draws:
        return (row.num_tokens - 1,)
    return tuple(dict.fromkeys(draw.offset % row.num_tokens for draw in row.draws))
