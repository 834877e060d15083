"""Beam search against Hugging Face `generate(num_beams=W)`: ids and summed log-probabilities.

    python -m benchmarks.checks.beam_parity             recorded: 6 prompts x 5 settings; live: 20x3
    python -m benchmarks.checks.beam_parity --no-live   the recorded ones alone, without torch
    python -m benchmarks.checks.beam_parity --quick     what was recorded of the tiny model

Where two continuations that decide which beams go on are nearer than NEAR_TIE, float32 rounding
decides in both programs: such searches are counted apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.common.hf_folder import write_hf_folder
from benchmarks.common.report import first_line, save
from benchmarks.common.sharegpt import load_sample
from jaxpage import LLM, BeamSearchParams
from jaxpage.host.beam import BeamSearch, Continuation

RECORDED = Path(__file__).parents[2] / "tests" / "golden" / "data"
NEAR_TIE = 1e-4
TOLERANCE = 1e-3
LIVE_PROMPTS, LIVE_TOKENS, LIVE_WIDTH = 20, 16, 4
LIVE_LENGTHS = (16, 40)
LENGTH_PENALTIES = (-1.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Search:
    """One search, and what Transformers found: ids, best first, and their scores."""

    prompt_ids: tuple[int, ...]
    params: BeamSearchParams
    sequences: list[list[int]]
    scores: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--no-live", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, dtype="float32", num_blocks=1024, max_model_len=128, seed=0)
    sets = {"recorded": recorded(is_tiny=args.quick)[:: 5 if args.quick else 1]}
    if not (args.quick or args.no_live):
        sets["live"] = live(args.model, live_prompts(llm))
    verdicts = {}
    for name, searches in sets.items():
        found = verdicts[name] = verdict(llm, searches)
        print(name, *(f"{key} {value}" for key, value in found.items()), sep="  ")
    llm.close()
    save("beam_parity", verdicts, is_quick=args.quick)
    if any(found["different"] for found in verdicts.values()):
        raise SystemExit(1)


def recorded(*, is_tiny: bool) -> list[Search]:
    """The searches that the tests keep, of the tiny model or of SmolLM2."""
    name, key = ("golden_tiny", "beams") if is_tiny else ("golden_smollm2_beam", "items")
    items = json.loads((RECORDED / f"{name}.json").read_text())[key]
    return [
        Search(
            tuple(item.get("prompt_ids") or item["prompt_token_ids"]),
            BeamSearchParams(
                **{each: item[each] for each in ("beam_width", "max_tokens", "length_penalty",
                                                 "early_stopping")}
            ),
            item["sequences"],
            item["scores"],
        )
        for item in items
    ]  # fmt: skip


def live_prompts(llm: LLM) -> list[list[tuple[int, ...]]]:
    """ShareGPT prompts cut to a few lengths: those of one length run as a batch without padding."""
    assert llm.tokenizer is not None
    whole = [tuple(llm.tokenizer.encode(item.prompt)) for item in load_sample(64)]
    batches, first = [], 0
    for length in LIVE_LENGTHS:
        fitting = [prompt[:length] for prompt in whole[first:] if len(prompt) >= length]
        batches.append(fitting[: LIVE_PROMPTS // len(LIVE_LENGTHS)])
        first += LIVE_PROMPTS
    return batches


def live(model: str, batches: list[list[tuple[int, ...]]]) -> list[Search]:
    """What Transformers finds now, by prompt and length penalty."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        peer: Any = AutoModelForCausalLM.from_pretrained(
            str(write_hf_folder(model, Path(folder) / "hf")), dtype=torch.float32
        ).eval()
    end = peer.generation_config.eos_token_id
    ends = set() if end is None else {end} if isinstance(end, int) else set(end)
    searches = []
    for prompts, penalty in product(batches, LENGTH_PENALTIES):
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=LIVE_WIDTH,
                num_return_sequences=LIVE_WIDTH,
                max_new_tokens=LIVE_TOKENS,
                length_penalty=penalty,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=min(ends, default=0),
            )
        rows = [_until_end(row, ends) for row in found.sequences[:, ids.shape[1] :].tolist()]
        scores = found.sequences_scores.tolist()
        for index, prompt in enumerate(prompts):
            own = slice(index * LIVE_WIDTH, (index + 1) * LIVE_WIDTH)
            params = BeamSearchParams(
                beam_width=LIVE_WIDTH, max_tokens=LIVE_TOKENS, length_penalty=penalty
            )
            searches.append(Search(prompt, params, rows[own], scores[own]))
    return searches


def verdict(llm: LLM, searches: list[Search]) -> dict[str, Any]:
    """How many searches came out the same, all of them in one batch."""
    params = [search.params for search in searches]
    with watched_gaps() as gaps:
        outputs = llm.generate(
            [search.prompt_ids for search in searches], params, raise_on_error=True
        )
    counts = {"searches": len(searches), "equal": 0, "near_ties": 0, "near_ties_equal": 0}
    different, worst = [], 0.0
    for index, (search, output) in enumerate(zip(searches, outputs, strict=True)):
        is_equal = [list(each.token_ids) for each in output.outputs] == search.sequences
        is_tie = gaps[id(search.params)] < NEAR_TIE
        if is_equal:
            for each, score in zip(output.outputs, search.scores, strict=True):
                length = len(each.token_ids)
                theirs = score * length**search.params.length_penalty
                worst = max(worst, abs(each.cumulative_logprob - theirs))
        counts["near_ties"] += is_tie
        counts["near_ties_equal"] += is_tie and is_equal
        counts["equal"] += is_equal and not is_tie
        if not is_equal and not is_tie:
            different.append({"search": index, "gap": gaps[id(search.params)]})
    is_close = worst <= TOLERANCE
    return {
        **counts,
        "different": len(different) + (not is_close),
        "worst_logprob_difference": float(f"{worst:.1e}"),
        **({"which": different} if different else {}),
    }


@contextmanager
def watched_gaps() -> Iterator[dict[int, float]]:
    """The smallest deciding gap of every search meanwhile, by its parameters' `id`."""
    gaps: dict[int, float] = {}
    advance = BeamSearch.advance

    def watched(
        self: BeamSearch,
        candidates: Sequence[Sequence[tuple[int, float]]],
        outputs: Sequence[Sequence[int]],
    ) -> tuple[Continuation, ...]:
        best, key = self._best(candidates), id(self._params)
        going_on = advance(self, candidates, outputs)
        gap = _gap(best, self._params.beam_width, self._end_ids, is_last=self.is_done)
        if self.is_done:
            scores = [found.score for found in self.finished]
            gap = min([gap, *(a - b for a, b in pairwise(scores))])
        gaps[key] = min(gaps.get(key, math.inf), gap)
        return going_on

    BeamSearch.advance = watched
    try:
        yield gaps
    finally:
        BeamSearch.advance = advance


def _gap(best: list[Continuation], width: int, end_ids: frozenset[int], *, is_last: bool) -> float:
    """Between the last continuation that is kept and the first that is not."""
    going_on = [entry for entry in best if entry.token_id not in end_ids]
    gap = math.inf
    if len(going_on) > width:
        gap = going_on[width - 1].score - going_on[width].score
    edge = best[width - 1 : width + 1]
    if len(edge) == 2 and (is_last or any(entry.token_id in end_ids for entry in edge)):
        gap = min(gap, edge[0].score - edge[1].score)  # whether an end is among the best W
    return gap


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """Up to and with the end token; what follows pads the batch."""
    return next((row[: i + 1] for i, token in enumerate(row) if token in ends), row)


if __name__ == "__main__":
    main()
