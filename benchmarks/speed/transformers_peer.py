"""Hugging Face Transformers on the same weights: static batches, padded, sdpa, torch's threads."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.sharegpt import Item

STATIC_BATCH = 16


class TransformersPeer:
    """Runs on a Hugging Face folder that `convert --to hf` writes of the same model."""

    def __init__(self, model: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        self._directory = tempfile.TemporaryDirectory()
        folder = str(export(model, Path(self._directory.name) / "hf"))
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None  # outputs have recorded lengths
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    def batch(self, items: list[Item]) -> None:
        for first in range(0, len(items), STATIC_BATCH):
            part = items[first : first + STATIC_BATCH]
            inputs = self._tokenizer([i.prompt for i in part], return_tensors="pt", padding=True)
            self._generate(inputs, max(item.output_tokens for item in part))

    def prefill(self, num_tokens: int) -> None:
        self._generate(self._ids(num_tokens), 1)

    def stream(self, num_tokens: int, new_tokens: int) -> float:
        """Seconds of `new_tokens` decode steps after a prompt: a long run less a run of one."""
        inputs = self._ids(num_tokens)
        start = time.perf_counter()
        self._generate(inputs, 1)
        middle = time.perf_counter()
        self._generate(inputs, new_tokens + 1)
        return (time.perf_counter() - middle) - (middle - start)

    def _ids(self, num_tokens: int) -> dict:
        from benchmarks.speed.throughput import context

        ids = self._torch.tensor([context(num_tokens)])
        return {"input_ids": ids, "attention_mask": self._torch.ones_like(ids)}

    def _generate(self, inputs: dict, num_tokens: int) -> None:
        with self._torch.inference_mode():
            self._model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
            )


def export(model: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns it."""
    from convert.__main__ import main

    code = main([model, str(folder), "--to", "hf", "--dtype", "float32"])
    if code:
        raise SystemExit(code)
    return folder
