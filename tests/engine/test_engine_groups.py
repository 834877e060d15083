"""The engine's step over a stub device: samples and beams, from the prompt to what is returned."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import BeamSearchParams
from tests.engine.fakes import LETTERS, StubEngine, run, said
from tests.host.fake import expected_beams, next_token


def test_samples_share_a_prompt_and_end_on_their_own() -> None:
    engine = StubEngine()
    engine.add("a", "abc", n=3, temperature=1.0)
    engine.add("b", "bcd")
    news = run(engine)
    last = news["a"][-1]
    assert [completion.index for completion in last.outputs] == [0, 1, 2]
    for completion in last.outputs:
        said_ids = [LETTERS.index(letter) for letter in "abc"]
        for _ in range(12):
            said_ids.append(next_token(said_ids, 0, completion.index))
        assert list(completion.token_ids) == said_ids[3:]
        assert completion.text == "".join(LETTERS[token] for token in said_ids[3:])
    assert news["b"][-1].outputs[0].text == said("bcd", 12)
    for earlier, later in pairwise(news["a"]):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.text.startswith(before.text)


def test_best_of_keeps_the_likeliest_and_streams_nothing() -> None:
    def outputs(**counts: int) -> list[RequestOutput]:
        engine = StubEngine()
        engine.add("a", "abc", temperature=1.0, **counts)
        return run(engine)["a"]

    every = sorted(outputs(n=4)[-1].outputs, key=lambda each: -each.cumulative_logprob)
    news = outputs(n=2, best_of=4)
    assert all(not output.outputs for output in news[:-1]) and news[-1].finished
    best = news[-1].outputs
    assert [each.token_ids for each in best] == [each.token_ids for each in every[:2]]
    assert [each.index for each in best] == [0, 1]


def test_a_beam_search_returns_its_hypotheses_best_first() -> None:
    engine = StubEngine()
    engine.add_request("a", "abc", BeamSearchParams(beam_width=3, max_tokens=5))
    request = engine._live["a"].request
    engine.device.fake.add(request)
    outputs = run(engine)["a"][-1].outputs
    wanted = expected_beams(request, engine.config)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in wanted]
    assert [each.score for each in outputs] == pytest.approx([each.score for each in wanted])
    assert [each.index for each in outputs] == [0, 1, 2]
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total


def test_an_aborted_beam_search_gives_its_blocks_back() -> None:
    engine = StubEngine()
    engine.add_request("a", "abc", BeamSearchParams(beam_width=3, max_tokens=50))
    engine.device.fake.add(engine._live["a"].request)
    for _ in range(5):
        engine.step()
    assert engine.abort("a")
    last = run(engine)["a"][-1]
    assert last.finished and {each.finish_reason for each in last.outputs} == {"abort"}
    assert engine.stats().blocks_free == engine.stats().blocks_total
