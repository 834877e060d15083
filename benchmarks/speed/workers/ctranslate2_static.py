"""CTranslate2, static batches of 16.

pip install ctranslate2==4.8.5; the model is a folder made once by
`ct2-transformers-converter --model HF_FOLDER --output_dir DIR --quantization float32`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ctranslate2

from benchmarks.common.timing import longer_less_shorter
from benchmarks.speed.workers.protocol import serve

STATIC_BATCH = 16


class CTranslate2:
    """Tokens are strings there; which ids they stand for is the model's own vocabulary."""

    def __init__(self, folder: str) -> None:
        threads = os.cpu_count() or 1
        self._generator = ctranslate2.Generator(folder, intra_threads=threads)
        self._words = json.loads((Path(folder) / "vocabulary.json").read_text())
        version = ctranslate2.__version__
        self.about = f"CTranslate2 {version}, float32, static batches of {STATIC_BATCH}"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        for first in range(0, len(prompts), STATIC_BATCH):
            part = slice(first, first + STATIC_BATCH)
            self._generate(prompts[part], max(lengths[part]))

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return longer_less_shorter(lambda count: self._generate([prompt], count), new_tokens)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        words = [[self._words[token_id] for token_id in prompt] for prompt in prompts]
        results = self._generator.generate_batch(
            words,
            max_length=num_tokens,
            min_length=num_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        assert all(len(result.sequences_ids[0]) == num_tokens for result in results)


if __name__ == "__main__":
    serve(CTranslate2)
