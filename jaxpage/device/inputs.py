"""Builds a StepInput from plain lists: what a caller without an engine writes.

All of it happens in NumPy, checked, int32, and goes to the device in one transfer.

    prefill_input([[1, 5, 9], [7]], block_tables=[[1], [2]], block_size=16)
    tokens 1 5 9 7   positions 0 1 2 0   slots 16 17 18 32   query_starts 0 3 4   logit_index 2 3
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

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
) -> StepInput:
    """A step that feeds several tokens a row; each row's last token gets its logits (R == B).

    `starts` are the tokens of each row that the cache already holds (none). The other three pad
    T, B and M, so that steps of different sizes share a program. A row's whole context counts
    as its prompt. Raises ConfigError when lists disagree in length or do not fit.
    """
    starts = [0] * len(token_lists) if starts is None else starts
    _check_lengths(token_lists=token_lists, block_tables=block_tables, starts=starts)
    lengths = [len(tokens) for tokens in token_lists]
    rows = _padded("num_rows", num_rows, len(lengths))
    tokens = _padded("num_tokens", num_tokens, sum(lengths))
    if tokens == rows and any(length != 1 for length in lengths):
        if num_tokens is not None:
            raise ConfigError(
                f"got num_tokens={tokens} equal to the {rows} rows, which means decode, but rows "
                "of other lengths than 1; raise num_tokens"
            )
        tokens += 1
    step = _empty(tokens, rows, _width(table_width, block_tables), rows)
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
        step.logit_index[row] = end - 1
    live = np.repeat(np.arange(len(lengths)), lengths)
    _fill_rows(step, live, block_tables, block_size)
    return jax.device_put(step)


def decode_input(
    tokens: Sequence[int],
    positions: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    prompt_lens: Sequence[int] | None = None,
    table_width: int | None = None,
    num_rows: int | None = None,
) -> StepInput:
    """A step that feeds one token a row, at its 0-based position; every row gets its logits.

    `prompt_lens` matters to dynamic rope scaling only (the whole context). `num_rows` and
    `table_width` pad B and M. Raises ConfigError when lists disagree in length or do not fit.
    """
    _check_lengths(tokens=tokens, positions=positions, block_tables=block_tables)
    if prompt_lens is not None:
        _check_lengths(tokens=tokens, prompt_lens=prompt_lens)
    count = len(tokens)
    rows = _padded("num_rows", num_rows, count)
    step = _empty(rows, rows, _width(table_width, block_tables), rows)
    if any(position < 0 for position in positions):
        raise ConfigError(f"got positions {list(positions)}, wanted 0 or more; they are 0-based")
    step.tokens[:count] = tokens
    step.positions[:count] = positions
    step.query_starts[:] = np.minimum(np.arange(rows + 1), count)
    step.logit_index[:count] = np.arange(count)
    _fill_rows(step, np.arange(count), block_tables, block_size)
    if prompt_lens is not None:
        step.prompt_lens[:count] = prompt_lens
    return jax.device_put(step)


def _empty(tokens: int, rows: int, width: int, draws: int) -> StepInput:
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
    )


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
