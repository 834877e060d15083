"""Transformers, static batches of 16, padded, sdpa.

pip install torch==2.13.0 transformers==5.24.0 (CPU build); the model is a Hugging Face folder.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from benchmarks.common.timing import longer_less_shorter
from benchmarks.speed.workers.protocol import serve

STATIC_BATCH = 16


class TransformersStatic:
    """Batches in file order, held until their longest answer ends."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        version = transformers.__version__
        self.about = f"Transformers {version}, float32, static batches of {STATIC_BATCH}, sdpa"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        for first in range(0, len(prompts), STATIC_BATCH):
            part = slice(first, first + STATIC_BATCH)
            self._generate(prompts[part], max(lengths[part]))

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return longer_less_shorter(lambda count: self._generate([prompt], count), new_tokens)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        assert out.shape == (len(prompts), width + num_tokens), out.shape


if __name__ == "__main__":
    serve(TransformersStatic)
