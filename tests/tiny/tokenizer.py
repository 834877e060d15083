"""How the tiny model's sentencepiece tokenizer is trained: byte-pair pieces and byte fallback.

The settings are LLaMA's (identity normalisation, a dummy prefix space, digits apart); signs of the
grammar's moods are left out of the training text, so that they are spelt in bytes.
"""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path

import sentencepiece

from tests.tiny.text import MOODS, documents

VOCAB_SIZE = 500
NUM_DOCUMENTS = 4000


def train_tokenizer(path: Path, *, seed: int) -> None:
    """Writes a sentencepiece `.model` of VOCAB_SIZE pieces; unknown 0, begin 1, end 2."""
    signs = {ord(sign): None for _, sign in MOODS}
    texts = islice(documents(seed), NUM_DOCUMENTS)
    lines = (line.translate(signs) for text in texts for line in text.split("\n"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))
