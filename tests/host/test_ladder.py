"""StepShapes fit counts, and cut steps that would mostly be padding."""

from __future__ import annotations

import pytest

from jaxpage.host.ladder import MAX_PADDING, Ladder, cut_to_rung

LADDERS = (Ladder.doubling(16, 2048), Ladder.doubling(16, 1000), Ladder((64, 192, 512)))


def test_doubling_ends_with_the_last_size() -> None:
    assert Ladder.doubling(1, 6).sizes == (1, 2, 4, 6)
    assert Ladder.doubling(16, 64).sizes == (16, 32, 64)
    assert Ladder.doubling(16, 8).sizes == (8,)


def test_a_gradual_ladder_pads_little() -> None:
    sizes = Ladder.gradual(192).sizes
    assert sizes[:7] == (1, 2, 4, 8, 12, 16, 20)
    assert sizes[-8:] == (104, 112, 120, 128, 144, 160, 176, 192)
    ladder = Ladder(sizes)
    assert all(
        ladder.fit(count) - count <= max(3, ladder.fit(count) / 9) for count in range(1, 193)
    )


def test_fit_is_the_smallest_rung_that_holds_the_count() -> None:
    ladder = Ladder((2, 4, 6))
    assert [ladder.fit(count) for count in range(1, 7)] == [2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("count", [0, -1, 7])
def test_overflow_is_our_own_mistake(count: int) -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        Ladder((2, 4, 6)).fit(count)


@pytest.mark.parametrize(
    ("num_tokens", "part"),
    [(100, 100), (96, 96), (95, 64), (90, 64), (65, 49), (17, 17), (16, 16), (5, 5), (128, 128)],
)
def test_a_step_is_cut_where_padding_would_be_over_a_quarter(num_tokens: int, part: int) -> None:
    assert cut_to_rung(num_tokens, Ladder((16, 32, 64, 128))) == part


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: str(ladder.sizes))
def test_cutting_never_computes_more_nor_makes_crumbs(ladder: Ladder) -> None:
    first, num_cut = ladder.sizes[0], 0
    for num_tokens in range(1, ladder.sizes[-1] + 1):
        part = cut_to_rung(num_tokens, ladder)
        left = num_tokens - part
        if left:
            num_cut += 1
            assert min(part, left) >= first
            assert ladder.fit(num_tokens) - num_tokens > MAX_PADDING * ladder.fit(num_tokens)
            assert ladder.fit(part) + ladder.fit(left) < ladder.fit(num_tokens)
    assert num_cut > 10
