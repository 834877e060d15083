"""Plans as packed vectors: one builder writes them over and over, and nothing stays behind."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxpage.backends import BACKENDS, PLAIN
from jaxpage.config import CacheConfig, EngineConfig
from jaxpage.device.types import unpack
from jaxpage.engine.batch import StepInputBuilder, draw_entries
from jaxpage.engine.step_shapes import StepShapes
from jaxpage.host.plan import Draw, PlannedRow, StepPlan
from jaxpage.sampling_params import SamplingParams
from tests.engine.shapes import all_shapes

SIZE = 4
CACHE = CacheConfig(num_blocks=100, block_size=SIZE)
LIMITS = EngineConfig(max_num_seqs=8, max_prefill_rows=2, max_model_len=64)
SHAPES = StepShapes.of(LIMITS, CACHE, PLAIN)


def row(seq_id: int, start: int, num_tokens: int, *, source: int | None = None) -> PlannedRow:
    """Sequence s has the blocks from 10 s on."""
    num_blocks = -(-(start + num_tokens) // SIZE)
    token_ids = () if source is not None else tuple(range(start, start + num_tokens))
    block_ids = tuple(range(10 * seq_id, 10 * seq_id + num_blocks))
    draw = Draw(seq_id, 0, 0, SamplingParams(), 3, ())
    return PlannedRow(seq_id, token_ids, source, start, num_tokens, block_ids, 3, (draw,))


def random_plan(rng: random.Random) -> StepPlan:
    seq_ids = rng.sample(range(1, 9), rng.randint(1, 8))
    num_prefills = rng.choice((0, 0, min(2, len(seq_ids))))
    rows = [
        row(seq_id, rng.randint(1, 30), 1, source=rng.choice((None, place)))
        for place, seq_id in enumerate(seq_ids[num_prefills:])
    ]
    rows += [
        row(seq_id, rng.randint(0, 8), rng.randint(2, 20)) for seq_id in seq_ids[:num_prefills]
    ]
    return StepPlan(1, tuple(rows), num_single=len(seq_ids) - num_prefills)


def test_a_plan_is_written_as_if_none_had_been_before() -> None:
    rng = random.Random(0)
    used = StepInputBuilder(SHAPES, CACHE)
    handed_out: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(200):
        plan = random_plan(rng)
        vector, shape = used.build(plan)
        fresh, fresh_shape = StepInputBuilder(SHAPES, CACHE).build(plan)
        assert shape == fresh_shape
        np.testing.assert_array_equal(vector, fresh, err_msg=str(plan))
        handed_out.append((vector, fresh))
    for vector, as_built in handed_out:  # a step in flight may still read its own
        np.testing.assert_array_equal(vector, as_built)


def test_decode_rows_and_their_padding() -> None:
    plan = StepPlan(1, (row(1, 5, 1), row(2, 8, 1, source=0), row(3, 0, 1)), num_single=3)
    step = unpack(*StepInputBuilder(SHAPES, CACHE).build(plan))
    dead = 101 * SIZE
    assert step.tokens.tolist() == [5, 0, 0, 0]
    assert step.positions.tolist() == [5, 8, 0, 0]
    assert step.slots.tolist() == [11 * SIZE + 1, 22 * SIZE, 30 * SIZE, dead + 3]
    assert step.block_tables[:, :3].tolist() == [[10, 11, 0], [20, 21, 22], [30, 0, 0], [0, 0, 0]]
    assert step.context_lens.tolist() == [6, 9, 1, 0]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 3]
    assert step.token_source.tolist() == [0, 1, 0, 0]
    assert step.logit_index.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("attention", ["xla", "native"])
@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8, 64])
def test_only_decode_has_one_token_in_every_row(num_seqs: int, attention: str) -> None:
    config = EngineConfig(max_model_len=64, max_num_seqs=num_seqs)
    shapes = StepShapes.of(config, CACHE, BACKENDS[attention]())
    decode = {shapes.decode(rows) for rows in range(1, num_seqs + 1)}
    groups = {shape for shape in all_shapes(shapes) if shape.num_groups}
    for shape in all_shapes(shapes):
        assert shape.is_decode == (shape in decode | groups), shape
        assert shape.num_draws >= min(shape.num_rows, num_seqs), shape


def test_each_draw_reads_the_token_it_names() -> None:
    """Random plans, decode, packed and mixed: draws at any of their row's tokens."""
    rng = random.Random(1)
    for _ in range(200):
        plan = random_plan(rng)
        rows = []
        for each in plan.rows:
            asked = [rng.randint(-each.num_tokens, -1) for _ in range(rng.choice((0, 1, 1, 3)))]
            offsets = [o + each.num_tokens * rng.choice((0, 1)) for o in asked]
            free = LIMITS.max_num_seqs - sum(len(row.draws) for row in rows)
            draws = tuple(replace(each.draws[0], offset=offset) for offset in offsets[:free])
            ids = tuple(1000 * each.seq_id + place for place in range(each.num_tokens))
            rows.append(each._replace(draws=draws, token_ids=ids, source=None))
        plan = replace(plan, rows=tuple(rows))
        vector, shape = StepInputBuilder(SHAPES, CACHE).build(plan)
        step = unpack(vector, shape)
        count = SHAPES.num_draws(shape, len(plan.draws)) if plan.draws else 0
        entries = draw_entries(plan, shape, count)
        entries = np.arange(count) if entries is None else entries
        assert len(plan.draws) <= len(entries) and (entries < shape.num_draws).all()
        read = step.tokens[step.logit_index[entries[: len(plan.draws)]]].tolist()
        want = [each.token_ids[draw.offset] for each in rows for draw in each.draws]
        assert read == want, plan
