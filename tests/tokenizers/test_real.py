"""Vocabularies of real models, carried by packages that are not installed for the tests.

`pip install --no-deps mistral-common llama-models` brings them; what they add to the small ones:
32,000 pieces and 128,000 ranks that nobody here made.
"""

from __future__ import annotations

import base64
import importlib.util
import random
import shutil
from pathlib import Path

import pytest
import sentencepiece

from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from jaxpage.tokenizers.pretokenizers import LLAMA3_PATTERN
from jaxpage.tokenizers.tiktoken_file import SPECIAL_TOKENS
from tests.tokenizers.kinds import HARD_TEXTS, SENTENCE, sentencepiece_keys, write_gguf


def packaged(package: str, path: str) -> Path:
    """A file of a package that is not imported; skips where there is none."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    if not places:
        pytest.skip(f"needs the vocabulary in {package}: pip install --no-deps {package}")
    return Path(places[0]) / path


def mistral(tmp_path: Path) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    source = packaged("mistral_common", "data/tokenizer.model.v1")
    shutil.copy(source, tmp_path / "tokenizer.model")
    return load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(source))


def texts() -> list[str]:
    draw = random.Random(0)
    letters = SENTENCE + "ABCéß😀ж\n\t'_<>/      0123"
    made = ["".join(draw.choice(letters) for _ in range(draw.randrange(80))) for _ in range(300)]
    return [*HARD_TEXTS, *made, Path(__file__).read_text(encoding="utf-8")]


def test_mistral_from_its_model(tmp_path: Path) -> None:
    tokenizer, library = mistral(tmp_path)
    assert tokenizer.vocab_size == 32_000
    for text in texts():
        assert tokenizer.encode(text) == [1, *library.encode(text)]
        assert tokenizer.decode(library.encode(text)) == text


@pytest.mark.slow
def test_mistral_from_gguf_and_from_what_is_saved(tmp_path: Path) -> None:
    tokenizer, _ = mistral(tmp_path)
    model = (tmp_path / "tokenizer.model").read_bytes()
    packed = load_tokenizer(write_gguf(tmp_path / "a.gguf", sentencepiece_keys(model)))
    save_tokenizer(tokenizer, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    draw = random.Random(1)
    for text in texts():
        ids = tokenizer.encode(text)
        assert packed.encode(text) == ids
        assert saved.encode(text) == ids
    for _ in range(500):
        ids = [draw.choice((draw.randrange(260), draw.randrange(32_000))) for _ in range(8)]
        assert packed.decode(ids) == saved.decode(ids) == tokenizer.decode(ids)


@pytest.mark.slow
def test_llama_3_from_its_file(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken to compare with")
    source = packaged("llama_models", "llama3/tokenizer.model")
    shutil.copy(source, tmp_path / "tokenizer.model")
    pairs = [line.split() for line in source.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    special = {name: len(ranks) + index for index, name in enumerate(SPECIAL_TOKENS)}
    oracle = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    tokenizer = load_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert tokenizer.vocab_size == 128_256
    assert tokenizer.eos_token_ids == saved.eos_token_ids == (128_001, 128_009, 128_008)
    for text in texts():
        assert tokenizer.encode(text) == [128_000, *oracle.encode(text)]
        assert saved.encode(text) == tokenizer.encode(text)
        assert tokenizer.decode(oracle.encode(text)) == text
