"""The tiny model's files belong together: text, tokenizer, weights, training script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxpage.checkpoint import load_weights
from tests.golden import DATA_DIR
from tests.helpers.formats import ModelFiles
from tests.tiny import MODEL_DIR
from tests.tiny.export import hf_config, hf_weights, tokenizer_config
from tests.tiny.text import KINDS, documents
from tests.tiny.tokenizer import load_tokenizer, train_tokenizer
from tests.tiny.train import CONFIG, HELD_OUT_SEED, TEXT_SEED, batches, loss_of

LOSS = 0.1701
"""Nats a token on held-out text, as the training reported it."""


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 1_000_000
    fixtures = [path for path in DATA_DIR.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in fixtures) < 1_000_000


def test_tokenizer_comes_out_of_the_text_again(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.model", seed=TEXT_SEED)
    assert (tmp_path / "tokenizer.model").read_bytes() == (
        MODEL_DIR / "tokenizer.model"
    ).read_bytes()


def test_every_document_survives_the_tokenizer() -> None:
    pieces = load_tokenizer(MODEL_DIR / "tokenizer.model")
    seen = set()
    for _, text in zip(range(300), documents(TEXT_SEED), strict=False):
        ids = pieces.encode(text)
        assert pieces.decode(ids) == text
        seen |= {pieces.is_byte(token_id) for token_id in ids}
    assert seen == {True, False}
    assert len(KINDS) > 5


def test_config_and_weights_are_what_the_script_writes() -> None:
    files = ModelFiles.read(MODEL_DIR)
    config, params = load_weights(MODEL_DIR)
    assert config == CONFIG
    assert files.config == hf_config(CONFIG)
    assert tokenizer_config(CONFIG)["chat_template"]
    written = hf_weights(CONFIG, params)
    assert written.keys() == files.weights.keys()
    for name, value in files.weights.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
        np.testing.assert_array_equal(value.astype(np.float16).astype(np.float32), value)


def test_loss_is_what_the_training_reported() -> None:
    """Training's own forward pass, packed rows and dense attention, on weights read by convert."""
    _, params = load_weights(MODEL_DIR)
    batch = next(batches(MODEL_DIR / "tokenizer.model", HELD_OUT_SEED))
    assert float(loss_of(params, batch)) == pytest.approx(LOSS, abs=0.02)
