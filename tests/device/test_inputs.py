"""What callers without an engine write: lists become a padded step, or an error that helps."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxpage.device.inputs import decode_input, prefill_input
from jaxpage.device.types import StepInput, StepShape, pack, unpack
from jaxpage.errors import ConfigError


def _lists(step: StepInput) -> dict[str, list]:
    """The fields of a step without groups and with one kind of rows."""
    assert step.group_rows is None and step.prefix_lens is None
    assert step.num_single in (0, step.num_rows)
    leaves = {name: leaf for name, leaf in vars(step).items() if hasattr(leaf, "shape")}
    return {name: np.asarray(leaf).tolist() for name, leaf in leaves.items()}


def test_prefill_rows_are_packed_and_padded() -> None:
    step = prefill_input(
        [[1, 5, 9], [7]],
        [[3, 2], [4]],
        2,
        starts=[1, 0],
        num_tokens=6,
        num_rows=3,
        table_width=3,
    )
    got = _lists(step)
    padding = got["slots"][4:]
    assert got == {
        "tokens": [1, 5, 9, 7, 0, 0],
        "positions": [1, 2, 3, 0, 0, 0],
        "slots": [7, 4, 5, 8, *padding],
        "block_tables": [[3, 2, 0], [4, 0, 0], [0, 0, 0]],
        "context_lens": [4, 1, 0],
        "query_starts": [0, 3, 4, 4],
        "token_source": [0, 0, 0],
        "prompt_lens": [4, 1, 0],
        "logit_index": [2, 3, 0],
    }
    assert len(set(padding)) == 2
    assert min(padding) > 2**30
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(step))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step)} == {"int32"}


def test_decode_rows_have_one_token_each() -> None:
    step = decode_input([8, 9], [3, 0], [[3, 2], [4]], 2, num_rows=3, prompt_lens=[2, 1])
    got = _lists(step)
    assert got["tokens"] == [8, 9, 0]
    assert got["positions"] == [3, 0, 0]
    assert got["slots"][:2] == [5, 8]
    assert got["block_tables"] == [[3, 2], [4, 0], [0, 0]]
    assert got["context_lens"] == [4, 1, 0]
    assert got["query_starts"] == [0, 1, 2, 2]
    assert got["prompt_lens"] == [2, 1, 0]
    assert got["logit_index"] == [0, 1, 0]
    assert StepShape.of(step).is_decode


def test_as_many_tokens_as_rows_is_decode_only_if_it_is() -> None:
    packed = StepShape.of(prefill_input([[1, 2]], [[1]], 4, num_rows=2))
    assert packed.num_tokens == packed.num_rows == 2 and not packed.is_decode
    assert StepShape.of(prefill_input([[1], [2]], [[1], [2]], 4)).is_decode


def test_packing_is_undone_by_unpacking() -> None:
    step = jax.device_get(prefill_input([[1, 5, 9], [7]], [[3, 2], [4]], 2, num_tokens=7))
    shape = StepShape.of(step)
    vector = pack(step)
    assert vector.dtype == np.int32
    assert vector.shape == (shape.packed_size,)
    assert _lists(unpack(vector, shape)) == _lists(step)
    inside = jax.jit(lambda vector: unpack(vector, shape))(vector)
    assert _lists(inside) == _lists(step)
    mixed = replace(
        step, num_single=1, group_rows=np.eye(2, dtype=np.int32), prefix_lens=step.logit_index
    )
    again = unpack(pack(mixed), StepShape.of(mixed))
    assert again.num_single == 1 and again.group_rows.tolist() == [[1, 0], [0, 1]]
    assert again.prefix_lens.tolist() == step.logit_index.tolist()
    unpack(vector, shape).context_lens[1] = 77  # views: the host fills a vector in place
    assert unpack(vector, shape).context_lens.tolist() == [3, 77]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_lists": [[1]]}, "1 token_lists, 2 block_tables"),
        ({"token_lists": [[1], []]}, "row 1 with 0 tokens"),
        ({"starts": [-1, 0]}, "row 0 with 3 tokens starting at -1"),
        ({"block_tables": [[1, 2], [0]]}, "block 0 is the null block"),
        ({"block_tables": [[1], [2]]}, "got 1 blocks of 2 for the 3 tokens of row 0, wanted 2"),
        ({"num_tokens": 3}, "num_tokens=3, wanted at least the 4"),
        ({"num_rows": 1}, "num_rows=1, wanted at least the 2"),
        ({"table_width": 1}, "table_width=1, wanted at least the 2"),
        ({"block_size": 0}, "block_size=0"),
        ({"token_lists": [], "block_tables": []}, "no rows"),
    ],
)
def test_what_does_not_fit_is_named(wrong: dict, message: str) -> None:
    good = {"token_lists": [[1, 2, 3], [4]], "block_tables": [[1, 2], [3]], "block_size": 2}
    prefill_input(**good)
    with pytest.raises(ConfigError, match=message):
        prefill_input(**good | wrong)


def test_decode_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="0-based"):
        decode_input([1], [-1], [[1]], 4)
    with pytest.raises(ConfigError, match="2 tokens, 1 positions"):
        decode_input([1, 2], [0], [[1], [2]], 4)
    with pytest.raises(ConfigError, match="1 tokens, 2 prompt_lens"):
        decode_input([1], [0], [[1]], 4, prompt_lens=[1, 2])


def test_draws_read_any_tokens_of_any_rows() -> None:
    draws = [(1, -1), (0, 0), (0, -2), (1, 0), (0, 2)]
    step = prefill_input([[1, 5, 9], [7]], [[1], [2]], 16, draws=draws, num_tokens=6)
    assert step.tokens[step.logit_index].tolist() == [7, 1, 5, 7, 9]
    for wrong in ((2, 0), (0, 3), (1, -2), (-1, 0)):
        with pytest.raises(ConfigError, match="draw"):
            prefill_input([[1, 5, 9], [7]], [[1], [2]], 16, draws=[wrong])


def test_adapters_are_the_rows_and_padding_has_none() -> None:
    step = prefill_input([[1, 5], [7]], [[1], [2]], 16, adapters=[3, 0], num_rows=4)
    assert step.adapters.tolist() == [3, 0, 0, 0]
    step = decode_input([1, 5], [0, 0], [[1], [2]], 16, adapters=[0, 2], num_rows=3)
    assert step.adapters.tolist() == [0, 2, 0]
    assert decode_input([1], [0], [[1]], 16).adapters is None
    for wrong in ([1, 2, 3], [-1]):
        with pytest.raises(ConfigError, match="adapters"):
            decode_input([1, 5], [0, 0], [[1], [2]], 16, adapters=wrong)
