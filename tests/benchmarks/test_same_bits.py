"""The comparison of two trees finds one bit, wherever it is; and the worker answers every kind."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import same_bits
from benchmarks.checks import same_bits_worker as worker
from tests.tiny import MODEL_DIR

BITS, NEXT = (-0.5).hex(), (-0.5 * (1 + 2**-52)).hex()


def make_record() -> dict[str, Any]:
    return {
        "prompt_token_ids": [1, 5],
        "error": None,
        "num_cached_tokens": 0,
        "prompt_logprobs": [None, [5, BITS, [[7, BITS]]]],
        "outputs": [
            {
                "index": 0,
                "text": "0x1p-1",
                "token_ids": [8, 9],
                "finish_reason": "length",
                "stop_reason": None,
                "cumulative_logprob": BITS,
                "score": None,
                "logprobs": [[8, BITS, []], [9, BITS, [[9, BITS], [4, BITS]]]],
            }
        ],
    }


def put(record: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """The record with another leaf."""
    changed = copy.deepcopy(record)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_equal_answers_have_no_difference_and_are_counted() -> None:
    tally = same_bits.compare({"0": make_record()}, {"0": make_record()})
    assert (tally.requests, tally.tokens, tally.logprobs) == (1, 2, 7)
    assert tally.differences == []
    assert "equal to the bit" in same_bits.verdict({"native": tally}, tally.differences)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("outputs", 0, "cumulative_logprob"), NEXT),
        (("outputs", 0, "logprobs", 0, 1), NEXT),
        (("outputs", 0, "logprobs", 1, 2, 1, 1), NEXT),
        (("prompt_logprobs", 1, 1), NEXT),
        (("prompt_logprobs", 1, 2, 0, 1), NEXT),
        (("outputs", 0, "logprobs"), None),
        (("outputs", 0, "logprobs", 0, 2), [[8, BITS]]),
        (("outputs", 0, "score"), BITS),
        (("outputs", 0, "token_ids", 1), 10),
        (("outputs", 0, "token_ids"), [8]),
        (("outputs", 0, "text"), "0x1p-2"),
        (("outputs", 0, "finish_reason"), "stop"),
        (("outputs", 0, "stop_reason"), 9),
        (("outputs",), []),
        (("prompt_token_ids", 0), True),
        (("num_cached_tokens",), 16),
        (("error",), "got no room"),
    ],
)
def test_every_leaf_counts(path: tuple[Any, ...], value: object) -> None:
    record = make_record()
    for old, new in (
        (record, put(record, path, value)),
        (put(record, path, value), record),
    ):
        tally = same_bits.compare({"0": record, "1": old}, {"0": record, "1": new})
        place = ".".join(map(str, path))
        assert tally.differences
        assert tally.differences[0].startswith(f"request 1, {place}")
        told = same_bits.verdict({"native": tally}, tally.differences)
        assert told.startswith("verdict: DIFFERENT") and place in told


@pytest.mark.parametrize("swapped", [False, True])
def test_a_request_that_only_one_side_answered_is_a_difference(swapped: bool) -> None:
    both, one = {"0": make_record(), "1": make_record()}, {"0": make_record()}
    old, new = (one, both) if swapped else (both, one)
    assert "request 1" in same_bits.compare(old, new).differences[0]


def test_the_seeded_difference_is_one_bit_of_a_float32() -> None:
    record = make_record()
    changed = copy.deepcopy(record)
    same_bits.flip_a_bit({"0": changed})
    tally = same_bits.compare({"0": record}, {"0": changed})
    assert len(tally.differences) == 1
    was, now = (float.fromhex(r["outputs"][0]["logprobs"][0][1]) for r in (record, changed))
    assert was != now == pytest.approx(was, rel=2e-7)


@pytest.mark.parametrize("options", [[], ["--seed-difference"]])
def test_the_command_ends_with_1_where_something_differs(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, str]] = []

    def run_in_tree(tree: Path, file: str, job: dict[str, Any], *, cache: str) -> dict[str, Any]:
        ran.append((tree.name, job["setup"]))
        stats = dict.fromkeys(same_bits.COUNTERS, 3)
        return {"requests": {"0": make_record()}, "stats": stats}

    trees = ["some/old", "some/new", "--tiny", "some/model"]
    monkeypatch.setattr(sys, "argv", ["same_bits", *trees, *options])
    monkeypatch.setattr(same_bits, "run_in_tree", run_in_tree)
    assert same_bits.main() == len(options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"| native | 1 | 2 | 7 | {len(options)} | 3 | 3 | 3 | 3 |"
    assert lines[-1].startswith("verdict: DIFFERENT, 1" if options else "verdict: equal to the bit")
    assert set(ran) == {(tree, name) for tree in ("old", "new") for name in worker.SETUPS}


def test_an_engine_that_did_not_do_its_part_is_named() -> None:
    answers = {
        "stats": {"preemptions_swap": 0, "prefix_hit_tokens": 5},
        "requests": {"0": make_record(), "1": make_record() | {"error": "got no room"}},
    }
    failed = "request 1 failed: got no room"
    assert same_bits.not_shown("native", answers) == [f"native: {failed}"]
    assert same_bits.not_shown("native, swap", answers) == [
        "native, swap: never seen: preemptions_swap",
        f"native, swap: {failed}",
    ]


def test_the_requests_are_of_every_kind_and_the_same_in_every_run() -> None:
    work = worker.make_work(200, 24)
    assert len(work) == 200
    assert work == worker.make_work(200, 24)
    assert len({repr(each) for each in work}) > 150
    assert len(worker.KINDS) < 200 * min(setup.share for setup in worker.SETUPS.values())


@pytest.mark.slow
def test_the_worker_answers_in_the_types_of_json() -> None:
    """A few requests on the tiny model: aborted, scored, beams, shared prefixes, drawn."""
    setup = worker.Setup(worker.WIDE | {"attention": "xla", "max_num_seqs": 4}, most_tokens=4)
    found = worker.run_setup(setup, str(MODEL_DIR), 5)
    assert set(found["requests"]) == {"0", "1", "2", "3", "4"}
    assert json.loads(json.dumps(found)) == found
    tally = same_bits.compare(found["requests"], found["requests"])
    assert tally.tokens > 10
    assert tally.logprobs > 20
    beams = found["requests"]["4"]["outputs"]
    assert [float.fromhex(each["score"]) for each in beams] == sorted(
        (float.fromhex(each["score"]) for each in beams), reverse=True
    )
