"""jaxpage as a worker: `pip install .`; the model is what `--model` takes."""

from __future__ import annotations

from benchmarks.speed.workers.protocol import serve
from jaxpage import LLM, SamplingParams


class Ours:
    """A pool that holds every sample; prefix caching off, since rounds repeat their prompts."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(
            model,
            dtype="float32",
            kv_memory="2GiB",
            max_num_seqs=64,
            enable_prefix_caching=False,
            seed=0,
        )
        self.about = "jaxpage, float32, continuous batching"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        params = [_forced(length) for length in lengths]
        outputs = self.llm.generate(prompts, params, raise_on_error=True)
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        metrics = [output.metrics for output in outputs]
        return [m.first_token_s - m.arrival_s for m in metrics if m and m.first_token_s]

    def prefill(self, prompt: list[int]) -> None:
        self.llm.generate(prompt, _forced(1), raise_on_error=True)

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        output = self.llm.generate(prompt, _forced(new_tokens + 1), raise_on_error=True)[0]
        metrics = output.metrics
        assert metrics is not None and metrics.finish_s and metrics.first_token_s
        return metrics.finish_s - metrics.first_token_s


def _forced(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    serve(Ours)
