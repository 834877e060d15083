"""Transformers' own continuous batching (`generate_batch`), paged attention in torch.

pip install torch==2.13.0 transformers==5.24.0 (CPU build); the model is a Hugging Face folder.
Its lengths are one for all, so each length is a call of its own where they differ.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from benchmarks.common.timing import longer_less_shorter
from benchmarks.speed.workers.protocol import serve


class TransformersContinuous:
    """One manager a call; all requests of a call share `max_new_tokens`."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.about = f"Transformers {transformers.__version__}, float32, continuous batching"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        self._generate(prompts, max(lengths))

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return longer_less_shorter(lambda count: self._generate([prompt], count), new_tokens)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = self._model.generate_batch(inputs=prompts, generation_config=config)
        counts = [len(output.generated_tokens) for output in outputs.values()]
        assert counts == [num_tokens] * len(prompts), counts


if __name__ == "__main__":
    serve(TransformersContinuous)
