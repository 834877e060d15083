"""The whole engine on the tiny trained model: golden ids, exactness, settings side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM, CapacityError, ConfigError, RequestError, SamplingParams, load
from jaxpage.device.types import StepShape
from tests.engine.shapes import all_shapes
from tests.tiny import MODEL_DIR

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = ["Tom has a red", "The", "", "One two three", "Anna and Ben went to the", "2 + 3 ="]
LIMITS: dict[str, Any] = {
    "num_blocks": 64, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "seed": 0,
}  # fmt: skip
TIGHT = {"block_size": 4, "num_blocks": 10}
"""Three of the prompts begin together, and each alone needs up to 8 blocks."""


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    config, params, tokenizer = load(str(MODEL_DIR), dtype="float32")
    return {"config": config, "params": params, "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def llm(parts: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(**parts, **LIMITS)
    yield llm
    llm.close()


def ids(llm: LLM, prompts: Any, params: Any) -> list[tuple[int, ...]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, raise_on_error=True)]


def mixed() -> list[SamplingParams]:
    """Settings that would disturb each other if rows could."""
    return [
        GREEDY,
        replace(GREEDY, temperature=0.8, top_k=5, seed=1),
        replace(GREEDY, temperature=1.3, top_p=0.7, seed=2, logprobs=3),
        replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.5),
        replace(GREEDY, temperature=0.5, min_p=0.1, seed=4, logit_bias={7: -100.0}, min_tokens=5),
        replace(GREEDY, bad_words=("a",), allowed_token_ids=tuple(range(3, 200))),
    ]


@pytest.mark.slow
def test_ids_are_the_same_alone_in_a_batch_and_in_any_order(llm: LLM) -> None:
    batch = ids(llm, PROMPTS, mixed())
    backwards = ids(llm, PROMPTS[::-1], mixed()[::-1])[::-1]
    alone = [ids(llm, [p], [s])[0] for p, s in zip(PROMPTS, mixed(), strict=True)]
    assert batch == backwards == alone
    assert len(set(batch)) == len(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_blocks": 128},
        {"block_size": 7},
        {"block_size": 32, "num_blocks": 16},
        TIGHT,
        {"max_num_seqs": 1, "max_num_batched_tokens": 16},
        {"attention": "reference", "max_num_seqs": 2},
    ],
    ids=str,
)
def test_ids_do_not_depend_on_how_the_engine_is_cut(
    llm: LLM, parts: dict[str, Any], options: dict[str, Any]
) -> None:
    other = LLM(**parts, **{**LIMITS, **options})
    expected = ids(llm, PROMPTS, mixed())
    assert ids(other, PROMPTS, mixed()) == expected
    if options == TIGHT:
        assert other.stats().preemptions_recompute > 0
        with pytest.raises(CapacityError, match="needs 15 blocks"):
            other.generate([5] * 57, GREEDY, raise_on_error=True)
    stats = other.stats()
    assert stats.blocks_free == stats.blocks_total
    other.close()


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_whatever_the_settings(llm: LLM) -> None:
    orders = [mixed()[shift:] + mixed()[:shift] for shift in range(len(PROMPTS))]
    for settings in orders:
        ids(llm, PROMPTS, settings)
    before = llm.stats().num_compilations
    for settings in orders:
        ids(llm, PROMPTS, [replace(s, temperature=s.temperature * 1.1) for s in settings])
    assert llm.stats().num_compilations == before


def test_the_number_of_programs_is_bounded_by_construction(llm: LLM) -> None:
    ids(llm, PROMPTS, mixed())
    shapes = all_shapes(llm.runner.shapes)
    own = [
        shape
        for shape in shapes
        if shape.num_single in (0, shape.num_rows) and not shape.num_groups
    ]
    assert [shape.num_tokens for shape in own] == [1, 2, 4, 16, 32]
    grouped = [2, 4] if llm.runner.shapes.has_groups else []
    assert [shape.num_tokens for shape in shapes if shape.num_groups] == grouped
    both = [shape for shape in shapes if 0 < shape.num_single < shape.num_rows]
    assert [shape.num_tokens for shape in both] == [4 + 16, 4 + 32]
    keys = llm.runner.programs.keys()
    assert {key for key in keys if isinstance(key, StepShape)} <= set(shapes)
    draws = [key for key in keys if isinstance(key, tuple) and key[0] == "draw"]
    row_counts = {shape.num_draws for shape in own}
    # edits or not, history none, short or long, alternatives or not
    assert 0 < len(draws) <= 2 * 3 * 2 * len(row_counts)


def test_a_step_updates_the_pool_in_place(llm: LLM) -> None:
    ids(llm, PROMPTS, GREEDY)
    pool = sum(leaf.nbytes for leaf in llm.runner._cache)
    for shape in all_shapes(llm.runner.shapes):
        memory = llm.runner._forward_program(shape).memory_analysis()
        assert memory.alias_size_in_bytes == pool, shape


def test_streamed_text_grows_to_the_whole(llm: LLM) -> None:
    params = replace(GREEDY, stop=("never there",))
    texts = [output.outputs[0].text for output in llm.stream("Tom has", params)]
    whole = llm.generate("Tom has", params)[0].outputs[0]
    assert texts[-1] == whole.text == llm.tokenizer.decode(whole.token_ids)  # pyright: ignore[reportOptionalMemberAccess]  # it has one
    assert all(texts[-1].startswith(text) for text in texts) and len(texts) == 20


def test_a_stream_that_is_dropped_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("Tom has", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.stats().blocks_free == llm.stats().blocks_total


def test_a_bad_request_comes_back_with_its_error_and_the_others_whole(llm: LLM) -> None:
    bad = replace(GREEDY, stop_token_ids=(10**6,))
    outputs = llm.generate(["Tom", "Tom", "x" * 500], [GREEDY, bad, GREEDY])
    assert [output.error is None for output in outputs] == [True, False, False]
    assert outputs[0].outputs[0].token_ids == ids(llm, "Tom", GREEDY)[0]
    assert outputs[1].outputs == () and outputs[1].finished
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate("Tom", bad, raise_on_error=True)
    assert ids(llm, "Tom", GREEDY) == [outputs[0].outputs[0].token_ids]


def test_ids_may_be_arrays_and_what_is_no_prompt_errs_alone(llm: LLM) -> None:
    wanted = ids(llm, [[1, 5, 9], [1, 7]], GREEDY)
    assert ids(llm, [np.array([1, 5, 9]), np.array([1, 7])], GREEDY) == wanted
    assert ids(llm, np.array([1, 5, 9]), GREEDY) == ids(llm, [1, 5, 9], GREEDY) == wanted[:1]
    nothing: Any = None
    outputs = llm.generate(["Tom", nothing, 7, [1, None]], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, False]
    assert all("got " in (output.error or "got ") for output in outputs)


def test_an_error_that_is_raised_leaves_the_engine_idle(llm: LLM) -> None:
    bad = replace(GREEDY, stop_token_ids=(10**6,))
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate(["Tom", "Tom"], [GREEDY, bad], raise_on_error=True)
    assert not llm.engine.has_unfinished


def test_a_conversation_that_no_template_takes_fails_alone(llm: LLM) -> None:
    good, wrong = [{"role": "user", "content": "Hi"}], [{"role": "user"}]
    outputs = llm.chat([good, wrong], GREEDY)
    assert [output.error is None for output in outputs] == [True, False]
    assert outputs[0].outputs == llm.chat(good, GREEDY)[0].outputs
    with pytest.raises(RequestError, match="content"):
        llm.chat([good, wrong], GREEDY, raise_on_error=True)
    assert not llm.engine.has_unfinished


def test_prompt_logprobs_do_not_depend_on_the_size_of_prefill_steps(
    llm: LLM, parts: dict[str, Any]
) -> None:
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=0)
    prompt = "Tom has a red ball. Anna has a blue hat and two cats."
    found = llm.generate(prompt, params, raise_on_error=True)[0]
    small = LLM(**parts, **{**LIMITS, "max_num_batched_tokens": 8})
    chunked = small.generate(prompt, params, raise_on_error=True)[0]
    small.close()
    assert found.outputs[0].token_ids == () and found.outputs[0].finish_reason == "length"
    assert found.prompt_logprobs is not None and chunked.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)
    for one, other in zip(found.prompt_logprobs[1:], chunked.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None
        assert one.token_id == other.token_id and len(one.top) == 2
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.slow
def test_rows_beyond_the_tokenizer_count_for_nothing(llm: LLM, parts: dict[str, Any]) -> None:
    """A padded vocabulary: the two rows more would win every draw, one where the other loses."""
    embedding, head = parts["params"]["embed"]["embedding"], parts["params"]["lm_head"]["kernel"]
    winners = np.outer(np.array([99, -99], np.float32), np.ones(head.shape[1], np.float32))
    params = {
        **parts["params"],
        "embed": {"embedding": np.concatenate([embedding, winners])},
        "lm_head": {"kernel": np.concatenate([head, winners])},
    }
    config = replace(parts["config"], vocab_size=parts["config"].vocab_size + 2)
    padded = LLM(config=config, params=params, tokenizer=parts["tokenizer"], **LIMITS)
    asked = replace(GREEDY, logprobs=2, prompt_logprobs=2)
    wanted, found = (one.generate("Tom has", asked)[0] for one in (llm, padded))
    padded.close()
    (mine,), (theirs,) = found.outputs, wanted.outputs
    assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
    drawn = zip(mine.logprobs or (), theirs.logprobs or (), strict=True)
    prompts = zip(found.prompt_logprobs or (), wanted.prompt_logprobs or (), strict=True)
    for one, other in (*drawn, *prompts):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


def test_raw_and_processed_logprobs_say_what_they_are(llm: LLM) -> None:
    biased = replace(GREEDY, logit_bias={9: 100.0}, max_tokens=1, logprobs=1)
    raw = llm.generate("Tom", biased)[0].outputs[0]
    processed = llm.generate("Tom", replace(biased, logprobs_mode="processed"))[0].outputs[0]
    assert raw.logprobs is not None and processed.logprobs is not None
    assert raw.token_ids == processed.token_ids == (9,)
    assert processed.logprobs[0].logprob == pytest.approx(0.0, abs=1e-3)
    assert raw.logprobs[0].logprob < -0.01 and raw.logprobs[0].top[0][0] != 9
    assert raw.cumulative_logprob == processed.cumulative_logprob == raw.logprobs[0].logprob


def test_new_weights_change_the_answer_without_a_recompile(llm: LLM, parts: dict[str, Any]) -> None:
    before, programs = ids(llm, "Tom has", GREEDY), llm.stats().num_compilations
    llm.update_params(jax.tree.map(lambda leaf: np.asarray(leaf) * 1.3, parts["params"]))
    changed = ids(llm, "Tom has", GREEDY)
    llm.update_params(parts["params"])
    assert ids(llm, "Tom has", GREEDY) == before != changed
    assert llm.stats().num_compilations == programs
    with pytest.raises(ConfigError, match="without 'embed/embedding'"):
        llm.update_params({"embed": np.zeros(3)})


def test_what_is_given_is_never_passed_over(parts: dict[str, Any]) -> None:
    given = parts["tokenizer"]
    llm = LLM(MODEL_DIR, tokenizer=given, **LIMITS)
    assert llm.tokenizer is given
    llm.close()
    with pytest.raises(ConfigError, match="got dtype='bfloat16' beside params"):
        LLM(**parts, **LIMITS, dtype="bfloat16")


def test_a_later_option_is_no_misspelt_one() -> None:
    with pytest.raises(ConfigError, match="kv_dtype, which comes with a later version"):
        LLM("smollm2-135m", kv_dtype="int8")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"enable_prefix_caching": 1}, ConfigError),
        ({"num_block": 4}, ConfigError),
        ({"shared_prefix_decode": "yes"}, ConfigError),
        ({"swap_blocks": -1}, ConfigError),
        ({"attention": "flash"}, ConfigError),
        ({"tensor_parallel_size": 2}, ConfigError),
        ({"preemption": "maybe"}, ConfigError),
        ({"dtype": "int8"}, ConfigError),
        ({"block_size": 0}, ConfigError),
        ({"max_num_seqs": True}, ConfigError),
        ({"max_model_len": 10**6}, ConfigError),
        ({"num_blocks": 10**9}, CapacityError),
        ({"num_blocks": 4, "kv_memory": "1MiB"}, ConfigError),
        ({"num_blocks": None, "kv_memory": "1KiB"}, CapacityError),
        ({"seed": -1}, ConfigError),
        ({"seed": 1.5}, ConfigError),
        ({"seed": 2**64}, ConfigError),
        ({"max_num_seqs": 10**20}, ConfigError),
        ({"block_size": 10**400}, ConfigError),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_anything_is_built(
    parts: dict[str, Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="got "):
        LLM(**parts, **{**LIMITS, **options})


def test_a_second_call_while_requests_run_is_refused(llm: LLM) -> None:
    llm.engine.add_request("mine", "Tom", GREEDY)
    with pytest.raises(ConfigError, match="idle engine"):
        llm.generate("Tom", GREEDY)
    assert llm.engine.abort("mine")
    while llm.engine.has_unfinished:
        llm.engine.step()
