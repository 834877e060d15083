"""Builds a StepInput from plain lists: what a caller without an engine writes.

All of it happens in NumPy, checked, int32, and goes to the device in one transfer.

    prefill_input([[1, 5, 9], [7]], block_tables=[[1], [2]], block_size=16)
    tokens 1 5 9 7   positions 0 1 2 0   slots 16 17 18 32   query_starts 0 3 4   logit_index 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpage.device.placement import put
from jaxpage.device.types import StepInput
from jaxpage.errors import ConfigError

LAST_PADDING_SLOT = 2**31 - 2
"""Padding slots count down from here: distinct, and beyond any pool."""


def prefill_input(
    token_lists: Sequence[Sequence[int]],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    starts: Sequence[int] | None = None,
    table_width: int | None = None,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    adapters: Sequence[int] | None = None,
    draws: Sequence[tuple[int, int]] | None = None,
) -> StepInput:
    """A step that feeds several tokens a row; each row's last token gets its logits (R == B).

    `starts`: how many tokens of each row the cache holds already (default 0). `num_tokens`,
    `num_rows` and `table_width` pad T, B and M, so that steps of different sizes share a program.
    `adapters`: the adapter of each row (default none). `draws`: the (row, token of the row) that
    get logits instead; a token is counted as Python does, (1, -1) is the last of row 1. A row's
    whole context counts as its prompt. ConfigError when lists disagree in length or do not fit.
    """
    starts = [0] * len(token_lists) if starts is None else starts
    _check_lengths(token_lists=token_lists, block_tables=block_tables, starts=starts)
    lengths = [len(tokens) for tokens in token_lists]
    rows = _padded("num_rows", num_rows, len(lengths))
    tokens = _padded("num_tokens", num_tokens, sum(lengths))
    num_draws = rows if draws is None else len(draws)
    draws = [(row, -1) for row in range(len(lengths))] if draws is None else draws
    step = _empty(tokens, rows, _width(table_width, block_tables), num_draws, adapters=adapters)
    end = 0
    for row, (ids, start) in enumerate(zip(token_lists, starts, strict=True)):
        if not len(ids) or start < 0:
            raise ConfigError(
                f"got row {row} with {len(ids)} tokens starting at {start}, wanted at least one "
                "token and a start of at least 0; leave the row out or give it tokens"
            )
        begin, end = end, end + len(ids)
        step.tokens[begin:end] = ids
        step.positions[begin:end] = np.arange(start, start + len(ids))
        step.query_starts[row + 1 :] = end
    for draw, (row, offset) in enumerate(draws):
        step.logit_index[draw] = _token_of(row, offset, lengths, step.query_starts)
    live = np.repeat(np.arange(len(lengths)), lengths)
    _fill_rows(step, live, block_tables, block_size)
    # one token a row and no padding: that is a decode step
    is_decode = tokens == rows and all(length == 1 for length in lengths)
    return put(replace(step, num_single=rows if is_decode else 0))


def decode_input(
    tokens: Sequence[int],
    positions: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    prompt_lens: Sequence[int] | None = None,
    table_width: int | None = None,
    num_rows: int | None = None,
    adapters: Sequence[int] | None = None,
) -> StepInput:
    """A step that feeds one token a row, at its 0-based position; every row gets its logits.

    `prompt_lens` (default: the whole context) matters to dynamic rope scaling only. `num_rows` and
    `table_width` pad B and M. `adapters`: the adapter of each row (default none).
    Raises ConfigError when lists disagree in length or do not fit.
    """
    _check_lengths(tokens=tokens, positions=positions, block_tables=block_tables)
    if prompt_lens is not None:
        _check_lengths(tokens=tokens, prompt_lens=prompt_lens)
    count = len(tokens)
    rows = _padded("num_rows", num_rows, count)
    width = _width(table_width, block_tables)
    step = _empty(rows, rows, width, rows, num_single=rows, adapters=adapters)
    if any(position < 0 for position in positions):
        raise ConfigError(f"got positions {list(positions)}, wanted 0 or more; they are 0-based")
    step.tokens[:count] = tokens
    step.positions[:count] = positions
    step.query_starts[:] = np.minimum(np.arange(rows + 1), count)
    step.logit_index[:count] = np.arange(count)
    _fill_rows(step, np.arange(count), block_tables, block_size)
    if prompt_lens is not None:
        step.prompt_lens[:count] = prompt_lens
    return put(step)


def _empty(
    tokens: int,
    rows: int,
    width: int,
    draws: int,
    *,
    num_single: int = 0,
    adapters: Sequence[int] | None = None,
) -> StepInput:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    return StepInput(
        tokens=zeros(tokens),
        positions=zeros(tokens),
        slots=LAST_PADDING_SLOT - np.arange(tokens, dtype=np.int32),
        block_tables=zeros(rows, width),
        context_lens=zeros(rows),
        query_starts=zeros(rows + 1),
        token_source=zeros(rows),
        prompt_lens=zeros(rows),
        logit_index=zeros(draws),
        adapters=None if adapters is None else _adapters(adapters, zeros(rows)),
        num_single=num_single,
    )


def _adapters(given: Sequence[int], out: np.ndarray) -> np.ndarray:
    if len(given) > len(out) or any(adapter < 0 for adapter in given):
        raise ConfigError(
            f"got adapters {list(given)} for {len(out)} rows, wanted 0 or more, one a row"
        )
    out[: len(given)] = given
    return out


def _token_of(row: int, offset: int, lengths: Sequence[int], starts: np.ndarray) -> int:
    """The place in T of a row's token."""
    if not 0 <= row < len(lengths) or not -lengths[row] <= offset < lengths[row]:
        raise ConfigError(
            f"got the draw ({row}, {offset}), wanted a row of 0 .. {len(lengths) - 1} and one of "
            "its tokens; check the row's length"
        )
    return int(starts[row]) + offset % lengths[row]


def _fill_rows(
    step: StepInput, row_of: np.ndarray, block_tables: Sequence[Sequence[int]], block_size: int
) -> None:
    """Tables, slots and lengths of the live rows; `row_of` is the row of each live token."""
    if block_size < 1:
        raise ConfigError(f"got block_size={block_size}, wanted at least 1")
    count = len(row_of)
    positions = step.positions[:count]
    for row, table in enumerate(block_tables):
        if any(block < 1 for block in table):
            raise ConfigError(
                f"got block table {list(table)} of row {row}, wanted block ids of at least 1: "
                "block 0 is the null block, where padding reads"
            )
        context_len = int(positions[row_of == row].max()) + 1
        needed = -(-context_len // block_size)
        if len(table) < needed:
            raise ConfigError(
                f"got {len(table)} blocks of {block_size} for the {context_len} tokens of row "
                f"{row}, wanted {needed}; give the row more blocks"
            )
        step.block_tables[row, : len(table)] = table
        step.context_lens[row] = context_len
        step.prompt_lens[row] = context_len
    blocks = step.block_tables[row_of, positions // block_size]
    step.slots[:count] = blocks * block_size + positions % block_size


def _check_lengths(**lists: Sequence[object]) -> None:
    lengths = {name: len(items) for name, items in lists.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ConfigError(f"got {got}, wanted one of each for every row")
    if not any(lengths.values()):
        raise ConfigError("got no rows, wanted at least one")


def _padded(name: str, asked: int | None, needed: int) -> int:
    if asked is None:
        return needed
    if asked < needed:
        raise ConfigError(f"got {name}={asked}, wanted at least the {needed} given; raise {name}")
    return asked


def _width(table_width: int | None, block_tables: Sequence[Sequence[int]]) -> int:
    return max(1, _padded("table_width", table_width, max(len(table) for table in block_tables)))
