"""The shapes that steps are padded to: what forward programs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.device.types import StepShape
from jaxpage.host.ladder import Ladder
from jaxpage.host.plan import StepPlan

SMALLEST_PREFILL_TOKENS = 16
"""The first rung of prefill: below it a step's time is that of reading the weights."""
FEW_DECODE_ROWS = 16
"""The least number of decode rows that mixed steps are compiled for."""


@dataclass(frozen=True, slots=True)
class Ladders:
    """The rungs that steps are padded to: together they bound the number of programs."""

    decode_rows: Ladder
    prefill_tokens: Ladder
    prefill_rows: int
    table_width: int
    mixed_rows: Ladder
    """Decode rows of a mixed step: few rungs, as they multiply those of prefill."""
    has_groups: bool = False
    """Whether decode steps also come in a form that reads shared leading blocks once."""

    @classmethod
    def of(cls, config: EngineConfig, cache: CacheConfig) -> Ladders:
        tokens = config.max_num_batched_tokens
        rows = config.max_num_seqs
        prefill = Ladder.doubling(min(SMALLEST_PREFILL_TOKENS, tokens), tokens)
        assert config.max_prefill_rows < max(2, prefill.sizes[0]), "would be taken for decode"
        return cls(
            # the native products take longer with every row, and their programs compile in a second
            decode_rows=Ladder.gradual(rows)
            if config.attention == "native"
            else Ladder.doubling(1, rows),
            prefill_tokens=prefill,
            prefill_rows=min(config.max_prefill_rows, rows),
            table_width=cache.blocks_for(config.max_model_len),
            mixed_rows=Ladder.doubling(min(FEW_DECODE_ROWS, rows), rows),
            has_groups=config.shared_prefix_decode and config.attention in ("xla", "pallas"),
        )

    def decode(self, num_rows: int, *, with_groups: bool = False) -> StepShape:
        rows = self.decode_rows.fit(num_rows)
        groups = rows // 2 if with_groups and self.has_groups else 0
        return StepShape(rows, rows, self.table_width, rows, num_groups=groups)

    def prefill(self, num_tokens: int) -> StepShape:
        tokens = self.prefill_tokens.fit(num_tokens)
        draws = self.decode_rows.fit(self.prefill_rows)  # so that decode's samplers serve
        return StepShape(tokens, self.prefill_rows, self.table_width, draws)

    def mixed(self, num_decode_rows: int, num_prefill_tokens: int) -> StepShape:
        decodes = self.mixed_rows.fit(num_decode_rows)
        rows = decodes + self.prefill_rows
        tokens = decodes + self.prefill_tokens.fit(num_prefill_tokens)
        return StepShape(tokens, rows, self.table_width, rows, num_decode_rows=decodes)

    def shape_of(self, plan: StepPlan, *, with_groups: bool = False) -> StepShape:
        """The program's shape for a plan; raises AssertionError when no rung holds it."""
        count = num_decode_rows(plan)
        if count == len(plan.rows):
            return self.decode(count, with_groups=with_groups)
        num_prefills = len(plan.rows) - count
        if plan.num_tokens <= self.prefill_tokens.sizes[-1] and len(plan.rows) <= self.prefill_rows:
            return self.prefill(plan.num_tokens)  # few decode rows are short prefill rows
        assert num_prefills <= self.prefill_rows, (num_prefills, self.prefill_rows)
        return self.mixed(count, plan.num_tokens - count)

    def num_draws(self, shape: StepShape, count: int) -> int:
        """Rows of the sampler's program for so many draws of a step of this shape."""
        if count <= shape.num_draws and not shape.num_decode_rows:
            return shape.num_draws
        return self.decode_rows.fit(count)

    def all_shapes(self) -> tuple[StepShape, ...]:
        """Every forward program that can ever be asked for."""
        return (
            *(self.decode(rows) for rows in self.decode_rows.sizes),
            *(
                self.decode(rows, with_groups=True)
                for rows in self.decode_rows.sizes[1:]
                if self.has_groups
            ),
            *(self.prefill(tokens) for tokens in self.prefill_tokens.sizes),
            *(
                self.mixed(rows, tokens)
                for rows in self.mixed_rows.sizes
                for tokens in self.prefill_tokens.sizes
            ),
        )


def num_decode_rows(plan: StepPlan) -> int:
    """The leading rows of one token whose prompt is not scored."""
    return plan.num_single
