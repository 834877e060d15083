"""What ends a sequence, and why."""

from __future__ import annotations

import pytest

from jaxpage.host.sequence import new_group
from jaxpage.host.updates import End, find_end
from tests.host.fake import beam_request, request


@pytest.mark.parametrize(
    ("output", "params", "end"),
    [
        ((5,), {}, None),
        ((9,), {}, End("stop")),
        ((5, 9), {"ignore_eos": True}, None),
        ((5, 7), {"stop_token_ids": (6, 7)}, End("stop", 7)),
        ((9,), {"stop_token_ids": (9,)}, End("stop")),  # as vLLM: end of text comes first
        ((9,), {"stop_token_ids": (9,), "ignore_eos": True}, End("stop", 9)),
        ((9,), {"min_tokens": 1}, None),
        ((5, 9), {"min_tokens": 1}, End("stop")),
        ((5, 7), {"min_tokens": 2, "stop_token_ids": (7,)}, None),
        ((5, 5, 5, 5), {}, End("length")),
        ((5, 5, 5, 9), {}, End("stop")),
        ((5, 5, 5, 9), {"min_tokens": 4}, End("length")),
    ],
)
def test_why_a_sequence_ends(
    output: tuple[int, ...], params: dict[str, object], end: End | None
) -> None:
    entry = request("a", [9, 7], eos=[9], **{"max_tokens": 4, **params})
    sequence = new_group(entry, 1, max_len=6).primary
    sequence.token_ids += output
    assert find_end(sequence) == end


def test_min_tokens_forbids_every_id_that_ends_it() -> None:
    entry = request("a", [1], eos=[9, 3], stop_token_ids=(7, 3))
    assert new_group(entry, 1, max_len=9).primary.draw.stop_token_ids == (3, 7, 9)
    entry = request("a", [1], eos=[9, 3], stop_token_ids=(7, 3), ignore_eos=True)
    assert new_group(entry, 1, max_len=9).primary.draw.stop_token_ids == (3, 7, 9)  # as vLLM
    beam = beam_request("a", [1], 2, eos=[9, 3], stop_token_ids=(7,), ignore_eos=True)
    (first, *_) = new_group(beam, 1, max_len=9).sequences
    assert first.draw.num_candidates == 2 * 2  # no id of the model's ends a beam: one does
