"""llama.cpp on an F32 GGUF, 16 slots: a small continuous batcher over its C API.

pip install llama-cpp-python==0.3.36 (builds llama.cpp by cmake); the model is a GGUF file in F32.
"""

from __future__ import annotations

import ctypes
import os
import time

import llama_cpp as cpp

from benchmarks.speed.workers.protocol import serve

NUM_SLOTS = 16
MAX_TOKENS = 2048


class LlamaCpp:
    """A waiting request takes a slot as soon as one is free; a step decodes all that run."""

    def __init__(self, path: str) -> None:
        cpp.llama_backend_init()
        self._model = cpp.llama_model_load_from_file(
            path.encode(), cpp.llama_model_default_params()
        )
        params = cpp.llama_context_default_params()
        params.n_ctx = NUM_SLOTS * 1280
        params.n_batch = MAX_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = NUM_SLOTS
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.kv_unified = True
        self._context = cpp.llama_init_from_model(self._model, params)
        self._memory = cpp.llama_get_memory(self._context)
        self._batch = cpp.llama_batch_init(MAX_TOKENS, 0, 1)
        vocab = cpp.llama_model_get_vocab(self._model)
        self._vocab_size = cpp.llama_vocab_n_tokens(vocab)
        self._sampler = cpp.llama_sampler_init_greedy()
        version = cpp.__version__
        self.about = f"llama.cpp ({version}), F32, {NUM_SLOTS} slots, continuous batching"

    def batch(self, prompts: list[list[int]], lengths: list[int]) -> list[float] | None:
        cpp.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        waiting = list(range(len(prompts)))
        free, running = list(range(NUM_SLOTS)), {}
        first_token_s = [0.0] * len(prompts)
        while waiting or running:
            entries, drawing = [], []
            for slot, state in running.items():
                entries.append((state["token"], state["length"], slot, True))
                drawing.append(slot)
                state["length"] += 1
            while waiting and free and len(entries) + len(prompts[waiting[0]]) <= MAX_TOKENS:
                index, slot = waiting.pop(0), free.pop()
                prompt = prompts[index]
                last = len(prompt) - 1
                entries += [(token, at, slot, at == last) for at, token in enumerate(prompt)]
                running[slot] = {"index": index, "length": len(prompt), "left": lengths[index]}
                drawing.append(slot)
            places = self._decode(entries)
            for slot, place in zip(drawing, places, strict=True):
                state = running[slot]
                state["token"] = cpp.llama_sampler_sample(self._sampler, self._context, place)
                first_token_s[state["index"]] = (
                    first_token_s[state["index"]] or time.perf_counter() - start
                )
                state["left"] -= 1
                if not state["left"]:
                    cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
                    free.append(slot)
                    del running[slot]
        return first_token_s

    def prefill(self, prompt: list[int]) -> None:
        self.batch([prompt], [1])

    def stream(self, prompt: list[int], new_tokens: int) -> float:
        start = time.perf_counter()
        first = self.batch([prompt], [new_tokens + 1])
        assert first is not None
        return time.perf_counter() - start - first[0]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs one batch; the places whose logits were asked for."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, slot, wants) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = slot
            batch.logits[place] = ctypes.c_int8(wants)
        code = cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returned {code}"
        return [place for place, entry in enumerate(entries) if entry[3]]


if __name__ == "__main__":
    serve(LlamaCpp)
