"""Which ids end a text: all that any file names, and those that chat models are known to use.

A fine-tune's files often disagree: its tokenizer has the new end of a turn and its config the base
model's. Each of them ends a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WELL_KNOWN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "\u2581<EOT>",
)
"""Source: `llama-vocab.cpp` of llama.cpp, where most of them are listed."""


def all_ends(named: Iterable[int], special: Mapping[str, int]) -> tuple[int, ...]:
    """`named` ids and those of well-known ends among the `special` tokens, each once."""
    known = [special[text] for text in WELL_KNOWN if text in special]
    if (
        "<|return|>" in special and "<|end|>" in special
    ):  # with both, <|end|> ends only a part of a turn
        known.remove(special["<|end|>"])
    return tuple(dict.fromkeys([*named, *known]))
