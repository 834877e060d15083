"""The whole engine on the tiny trained model against transformers' word, kept in a golden file.

data/golden_tiny.json holds greedy ids, log-probabilities and beam search of every prompt in
tests/tiny/prompts.py; tests/tiny/make_golden.py writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.outputs import RequestOutput
from tests.golden import DATA_DIR
from tests.tiny import MODEL_DIR
from tests.tiny.prompts import GREEDY_TOKENS, PROMPTS

GOLDEN = json.loads((DATA_DIR / "golden_tiny.json").read_text())
GREEDY: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["greedy"]}
PROMPT_IDS: list[list[int]] = [case["prompt_token_ids"] for case in GREEDY.values()]
WANTED_IDS: list[list[int]] = [case["token_ids"] for case in GREEDY.values()]
TOLERANCE = 1e-4
"""Of a log-probability; the golden ones are rounded to six places."""
ASKED = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, logprobs=5, prompt_logprobs=0)


def make_llm(**options: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "num_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 256,
        "seed": 0,
    }
    return LLM(str(MODEL_DIR), **(settings | options))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = make_llm()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> dict[str, RequestOutput]:
    """Every prompt, as text, in one batch."""
    found = llm.generate(list(PROMPTS.values()), ASKED, raise_on_error=True)
    return dict(zip(PROMPTS, found, strict=True))


def ids_of(found: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in found] == [None] * len(found)
    return [list(output.outputs[0].token_ids) for output in found]


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_text_is_that_of_transformers(
    name: str, outputs: dict[str, RequestOutput], llm: LLM
) -> None:
    found, case = outputs[name], GREEDY[name]
    completion = found.outputs[0]
    assert list(found.prompt_token_ids) == case["prompt_token_ids"]
    assert list(completion.token_ids) == case["token_ids"]
    assert completion.finish_reason == case["finish_reason"]
    assert llm.tokenizer is not None
    assert completion.text == llm.tokenizer.decode(case["token_ids"])


@pytest.mark.parametrize("name", PROMPTS)
def test_logprobs_are_those_of_transformers(name: str, outputs: dict[str, RequestOutput]) -> None:
    completion, case = outputs[name].outputs[0], GREEDY[name]
    assert completion.logprobs is not None
    for step, entry in enumerate(completion.logprobs):
        best = case["top_logprobs"][step]
        assert entry.logprob == pytest.approx(best[0], abs=TOLERANCE)
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=TOLERANCE)
        wanted = dict(zip(case["top_ids"][step], best, strict=True))
        for token_id, logprob in entry.top:
            # Two that are as likely as each other may change places at the end of the five.
            assert logprob == pytest.approx(wanted.get(token_id, best[-1]), abs=TOLERANCE)
    total = sum(entry.logprob for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_logprobs_are_those_of_transformers(
    name: str, outputs: dict[str, RequestOutput]
) -> None:
    entries, case = outputs[name].prompt_logprobs, GREEDY[name]
    assert entries is not None
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == case["prompt_token_ids"][1:]
    told = [entry.logprob for entry in entries[1:] if entry]
    assert told == pytest.approx(case["prompt_logprobs"][1:], abs=TOLERANCE)


@pytest.mark.slow
def test_ids_do_not_depend_on_batch_or_order(llm: LLM) -> None:
    assert ids_of(llm.generate(PROMPT_IDS[::-1], ASKED)) == WANTED_IDS[::-1]
    for prompt, ids in zip(PROMPT_IDS[::3], WANTED_IDS[::3], strict=True):
        assert ids_of(llm.generate([prompt], ASKED)) == [ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_blocks": 1024},
        {"block_size": 7},
        {"block_size": 32, "num_blocks": 64, "max_num_batched_tokens": 24},  # prompts in pieces
        {"block_size": 4, "num_blocks": 40},  # too few for four at once: some start again
    ],
    ids=lambda options: "-".join(f"{key}_{value}" for key, value in options.items()),
)
def test_ids_do_not_depend_on_the_pool(options: dict[str, Any]) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | options
    engine = make_llm(**settings)
    greedy = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS)
    assert ids_of(engine.generate(PROMPT_IDS, greedy)) == WANTED_IDS
    stats = engine.stats()
    assert (stats.preemptions_recompute > 0) == (stats.blocks_total == 40)
    assert stats.blocks_free == stats.blocks_total
    engine.close()


@pytest.mark.slow
def test_stream_shows_no_half_characters(llm: LLM, outputs: dict[str, RequestOutput]) -> None:
    """The signs in this text are four tokens each, a byte a token."""
    texts = [out.outputs[0].text for out in llm.stream(PROMPTS["bytes"], ASKED)]
    assert any(sign in texts[-1] for sign in "😀😢😴🍎❄")
    assert texts[-1] == outputs["bytes"].outputs[0].text
    assert all(after.startswith(before) for before, after in pairwise(texts))
    # The last one is whole, and max_tokens may have cut it inside a sign.
    assert not any("\ufffd" in text for text in texts[:-1])


def test_chat_wraps_with_the_template(llm: LLM) -> None:
    """The template's text is the question prompt of the golden file, begin mark and all."""
    out = llm.chat([{"role": "user", "content": "What colour is the snow?"}], ASKED)
    output = out[0] if isinstance(out, list) else out
    assert list(output.prompt_token_ids) == GREEDY["question"]["prompt_token_ids"]
    assert ids_of([output]) == [GREEDY["question"]["token_ids"]]


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN["beams"][::4], ids=lambda case: case["name"])
def test_golden_beam_scores_follow_from_our_logprobs(case: dict[str, Any], llm: LLM) -> None:
    """A beam's score is its summed log-probability over its length to the penalty's power."""
    scoring = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    prompts = [case["prompt_token_ids"] + ids for ids in case["sequences"]]
    for ids, score, found in zip(
        case["sequences"], case["scores"], llm.generate(prompts, scoring), strict=True
    ):
        assert found.prompt_logprobs is not None
        told = found.prompt_logprobs[-len(ids) :]
        total = math.fsum(entry.logprob for entry in told if entry)
        wanted = score * len(ids) ** case["length_penalty"]
        assert total == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own deprecations
def test_golden_file_is_what_transformers_says() -> None:
    """Live parity: the file is no older than the model beside it."""
    import torch

    from tests.tiny import make_golden

    model = make_golden.load(MODEL_DIR)
    with torch.no_grad():
        for name in ("story", "bytes", "begin", "long"):
            found = make_golden.greedy(model, GREEDY[name]["prompt_token_ids"], GREEDY_TOKENS)
            assert found["token_ids"] == GREEDY[name]["token_ids"]
            for told, kept in zip(found["top_logprobs"], GREEDY[name]["top_logprobs"], strict=True):
                assert told == pytest.approx(kept, abs=TOLERANCE)
        for case in GOLDEN["beams"][::6]:
            setting = (case["beam_width"], case["length_penalty"], case["early_stopping"])
            found = make_golden.beam(model, case["prompt_token_ids"], *setting)
            assert found["sequences"] == case["sequences"]
