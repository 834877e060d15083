"""Writes what Hugging Face transformers says of the test models: tests/golden/data.

`python -m tests.tiny.make_golden`; needs torch and transformers. Float32, eager attention, CPU.
The tests compare with these files, so that they need neither.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden import DATA_DIR
from tests.helpers.formats import VARIANTS, variant, write_hf
from tests.tiny import MODEL_DIR
from tests.tiny.prompts import BEAM_PROMPTS, BEAM_SETTINGS, BEAM_TOKENS, GREEDY_TOKENS, PROMPTS
from tests.tiny.tokenizer import load_tokenizer

NUM_TOP = 5
VARIANT_PROMPT = [1, 7, 3, 11, 60, 2, 44, 44, 9, 81, 30, 17, 5, 90, 33, 21, 64, 8, 70, 12, 50, 28]
VARIANT_TOKENS = 4


def main() -> None:
    """Writes both files."""
    torch.set_grad_enabled(False)
    pieces = load_tokenizer(MODEL_DIR / "tokenizer.model")
    model = load(MODEL_DIR)
    ids = {name: [pieces.bos_id(), *pieces.encode(text)] for name, text in PROMPTS.items()}
    write(
        DATA_DIR / "golden_tiny.json",
        greedy=[
            {"name": name, "prompt": text, **greedy(model, ids[name], GREEDY_TOKENS)}
            for name, text in PROMPTS.items()
        ],
        beams=[
            {"name": name, "prompt": PROMPTS[name], **beam(model, ids[name], *setting)}
            for name in BEAM_PROMPTS
            for setting in BEAM_SETTINGS
        ],
    )
    write(DATA_DIR / "golden_tiny_random.json", variants=[random_case(name) for name in VARIANTS])


def load(folder: Path) -> Any:
    """The model in float32 with the plain attention; so small a one is quickest on one thread."""
    torch.set_num_threads(1)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: Any, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Most likely tokens up to an end token, which is kept, and the best NUM_TOP at every step."""
    ids, cache, tops = list(prompt_ids), None, []
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    fed, prompt_logprobs = torch.tensor([prompt_ids]), None
    while len(tops) < max_tokens:
        out = model(fed, cache=cache, use_cache=True)
        cache, logprobs = out.past_key_values, torch.log_softmax(out.logits[0], -1)
        if prompt_logprobs is None:
            told = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)]
            prompt_logprobs = [None, *rounded(told)]
        top = logprobs[-1].topk(NUM_TOP)
        tops.append([top.indices.tolist(), rounded(top.values)])
        ids.append(tops[-1][0][0])
        fed = torch.tensor([[ids[-1]]])
        if ids[-1] in ends:
            break
    return {
        "prompt_token_ids": prompt_ids,
        "token_ids": ids[len(prompt_ids) :],
        "finish_reason": "stop" if ids[-1] in ends else "length",
        "prompt_logprobs": prompt_logprobs,
        "top_ids": [top[0] for top in tops],
        "top_logprobs": [top[1] for top in tops],
    }


def beam(
    model: Any, prompt_ids: list[int], width: int, length_penalty: float, early: bool | str
) -> dict[str, Any]:
    """All beams of Hugging Face's beam search, up to and with the end token, and their scores."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=early,
        max_new_tokens=BEAM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = [row[len(prompt_ids) :].tolist() for row in out.sequences]
    end = model.config.eos_token_id
    return {
        "prompt_token_ids": prompt_ids,
        "beam_width": width,
        "length_penalty": length_penalty,
        "early_stopping": early,
        "max_tokens": BEAM_TOKENS,
        "sequences": [ids[: ids.index(end) + 1] if end in ids else ids for ids in sequences],
        "scores": [float(f"{score:.7g}") for score in out.sequences_scores.tolist()],
    }


def random_case(name: str) -> dict[str, Any]:
    """Greedy ids of a random model, and the logits after the prompt."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(write_hf(variant(name), Path(folder)))
    model.generation_config.eos_token_id = []
    logits = model(torch.tensor([VARIANT_PROMPT])).logits[0, -1]
    result = greedy(model, VARIANT_PROMPT, VARIANT_TOKENS)
    return {
        "variant": name,
        "prompt_token_ids": VARIANT_PROMPT,
        "token_ids": result["token_ids"],
        "logits": rounded(logits),
    }


def rounded(values: torch.Tensor) -> list[float]:
    """Six places: a tenth of the tolerance that the tests ask for."""
    return [round(value, 6) for value in values.tolist()]


def write(path: Path, **parts: list[dict[str, Any]]) -> None:
    """JSON with a case a line, so that a change of one case is one line of a diff."""
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = [f'"about": {json.dumps(about)}']
    for name, cases in parts.items():
        rows = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        lines.append(f'"{name}": [\n{rows}\n]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
