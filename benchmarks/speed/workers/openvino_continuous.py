"""OpenVINO GenAI, continuous batching, everything kept in float32.

pip install openvino-genai==2026.4.0; the model is a folder made once, offline, by
`optimum-cli export openvino -m HF_FOLDER --task text-generation-with-past --weight-format fp32`
(`pip install "optimum-intel[openvino]"`, HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.common.timing import longer_less_shorter
from benchmarks.speed.workers.protocol import serve


class OpenVino:
    """The hint and the cache precision keep it from rounding to bfloat16 on its own."""

    def __init__(self, folder: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipe: Any = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", properties
        )
        version = openvino_genai.__version__.split("-")[0]
        self.about = f"OpenVINO GenAI {version}, float32, continuous batching"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        tensors = [openvino.Tensor(np.asarray([prompt], np.int64)) for prompt in prompts]
        results = self._pipe.generate(tensors, [_forced(length) for length in lengths])
        counts = [len(result.m_generation_ids[0]) for result in results]
        assert counts == lengths, (counts, lengths)

    def prefill(self, prompt: list[int]) -> None:
        self.batch([prompt], [1])

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        return longer_less_shorter(lambda count: self.batch([prompt], [count]), new_tokens)


def _forced(num_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVino)
