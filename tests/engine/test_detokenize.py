"""Streamed text is the whole text, cut at the right place, and never more than that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.engine.detokenize import Detokenizer, StopMatcher
from jaxpage.tokenizer import Tokenizer
from tests.tokenizers.kinds import HARD_TEXTS, KINDS, make

REPLACEMENT = "\ufffd"
texts = st.text(alphabet="ab c\n日é😀.", max_size=30)
stops = st.lists(st.text(alphabet="ab c\n日", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory: Path = tmp_path_factory.mktemp("kinds")
    return {kind: make(kind, directory) for kind in KINDS}


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text after each id and after the end; ids after a stop string are not given."""
    seen = []
    for token_id in token_ids:
        found = detokenizer.append([token_id])
        seen.append(detokenizer.text)
        if found is not None:
            break
    detokenizer.finish()
    return [*seen, detokenizer.text]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_to_their_whole_decode(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    # Low ids are bytes and special tokens, so half of all runs are no UTF-8.
    ids = st.one_of(st.integers(0, 300), st.integers(0, tokenizer.vocab_size - 1))
    token_ids = data.draw(st.lists(ids, max_size=24))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    seen = stream(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids)
    assert seen[-1] == whole
    assert all(whole.startswith(text) for text in seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_no_half_character_is_ever_shown(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    seen = stream(Detokenizer(tokenizer), token_ids)
    assert seen[-1] == text
    assert all(text.startswith(each) for each in seen)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_stop_strings_cut_the_text_where_they_begin(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer, text, stop = tokenizers[kind], data.draw(texts), data.draw(stops)
    include = data.draw(st.booleans())
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=stop, include_stop=include)
    seen = stream(detokenizer, token_ids)

    used = tokenizer.decode(token_ids[: detokenizer.num_tokens])
    before = tokenizer.decode(token_ids[: max(0, detokenizer.num_tokens - 1)])
    assert not any(each in before.rstrip(REPLACEMENT) for each in stop)  # found at once
    starts = [(used.find(each), index) for index, each in enumerate(stop) if each in used]
    if starts:
        start, index = min(starts)
        assert seen[-1] == used[: start + len(stop[index]) * include]
    else:
        assert seen[-1] == text
    assert all(seen[-1].startswith(each) for each in seen)


@given(
    parts=st.lists(st.text(alphabet="abc", max_size=3), max_size=8),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_matcher_holds_back_what_may_begin_a_stop_string_and_no_more(
    parts: list[str], stop: list[str]
) -> None:
    matcher, text, shown = StopMatcher(stop), "", ""
    for part in parts:
        text += part
        shown += matcher.feed(part)
        if matcher.found:
            break
        held = text[len(shown) :]
        assert not held or any(each.startswith(held) for each in stop)
        longer = [text[i:] for i in range(len(shown))]
        assert not any(each.startswith(end) for each in stop for end in longer)
    if matcher.found:
        assert shown == text[: min(text.find(each) for each in stop if each in text)]
    else:
        assert shown + matcher.release() == text


class Letters:
    """Each id is a piece of text of its own."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def stream(self, *, skip_special_tokens: bool = True) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    @property
    def pending(self) -> str:
        return ""


def run(
    pieces: Sequence[str], stop: Sequence[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """The text after each piece, and the stop string."""
    detokenizer = Detokenizer(
        Letters(*pieces),  # type: ignore[arg-type] # streams alone
        stop=stop,
        include_stop=include,
        min_tokens=min_tokens,
    )
    seen = stream(detokenizer, range(len(pieces)))
    return seen, detokenizer.finish()


def test_a_stop_string_over_several_tokens_ends_the_text() -> None:
    seen, found = run(["M N ", "O", " P", " Q R"], ["O P Q"])
    assert found == "O P Q"
    assert seen == ["M N ", "M N ", "M N ", "M N ", "M N "]


def test_a_failed_beginning_of_a_stop_string_is_shown_once() -> None:
    seen, found = run(["Hi ", "Ali", "ce", "!", " Bob", "\n", "x"], ["\n", "Alice:"])
    assert seen == ["Hi ", "Hi ", "Hi ", "Hi Alice!", "Hi Alice! Bob"] + ["Hi Alice! Bob"] * 2
    assert found == "\n"


def test_what_is_held_when_the_text_ends_is_shown() -> None:
    seen, found = run(["so", " Ali", "ce"], ["Alice:"])
    assert seen == ["so", "so ", "so ", "so Alice"]
    assert found is None


def test_the_stop_string_stays_only_when_asked_for() -> None:
    pieces = ["one", " STOP two"]
    assert run(pieces, ["STOP"])[0][-1] == "one "
    assert run(pieces, ["STOP"], include=True)[0][-1] == "one STOP"


def test_the_end_of_a_stop_string_alone_does_not_stop() -> None:
    seen, found = run(["b", "a", "b"], ["ab"])
    assert seen[0] == "b"
    assert (seen[-1], found) == ("b", "ab")


def test_the_first_match_wins_and_of_two_at_one_place_the_first_listed() -> None:
    assert run(["xxabxx"], ["b", "a"])[1] == "a"
    assert run(["xxabxx"], ["ab", "a"])[1] == "ab"
    assert run(["xxabxx"], ["a", "ab"])[1] == "a"


def test_a_match_inside_a_failed_longer_one_is_found() -> None:
    seen, found = run(["a", "b", "c"], ["abX", "bc"])
    assert (seen[-1], found) == ("a", "bc")


def test_stop_strings_wait_for_min_tokens() -> None:
    assert run(["a", ".", "b", "."], ["."], min_tokens=2)[0] == ["a", "a.", "a.b", "a.b", "a.b"]
    assert run(["a", "."], ["."], min_tokens=2) == (["a", "a.", "a."], None)
    # "b" ended too early, though it was still held as the beginning of "abc".
    assert run(["ab", "x"], ["abc", "b"], min_tokens=1) == (["", "abx", "abx"], None)
    # One that begins among the first tokens and ends after them counts.
    assert run(["a", "b", "c"], ["bc"], min_tokens=2)[0] == ["a", "a", "a", "a"]


def test_several_ids_at_once_end_at_the_stop_string() -> None:
    detokenizer = Detokenizer(
        Letters("a", "b", "c"),  # type: ignore[arg-type] # streams alone
        stop=["b"],
    )
    assert detokenizer.append([0, 1, 2]) == "b"
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_at_the_end_is_shown_once(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.append(token_ids)
    assert detokenizer.text == "a"
    for _ in range(2):
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(token_ids) != "a"


def test_finish_twice_shows_nothing_twice() -> None:
    detokenizer = Detokenizer(Letters("so", "ab"), stop=["abc"])  # type: ignore[arg-type] # streams
    detokenizer.append([0, 1])
    assert [detokenizer.finish(), detokenizer.finish(), detokenizer.text] == [None, None, "soab"]


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece as json"])
def test_min_tokens_counts_byte_tokens_that_are_still_held(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("a😀b", add_special_tokens=False)
    early = Detokenizer(tokenizer, stop=["😀"], min_tokens=len(token_ids) - 1)
    assert stream(early, token_ids)[-1] == "a😀b"
    late = Detokenizer(tokenizer, stop=["😀"], min_tokens=len(token_ids) - 2)
    assert stream(late, token_ids)[-1] == "a"


@pytest.mark.parametrize("kind", ["sentencepiece", "gguf sentencepiece", "sentencepiece as json"])
def test_a_stop_string_of_byte_tokens_stops_at_once(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("a😀😀😀b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["😀😀"])
    assert stream(detokenizer, token_ids)[-1] == "a"
    assert tokenizer.decode(token_ids[: detokenizer.num_tokens]) == "a😀😀"


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_matches_no_stop_string_until_the_end(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("😀", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=[REPLACEMENT])
    assert [detokenizer.append([token_id]) for token_id in token_ids] == [None] * len(token_ids)
    cut_off = Detokenizer(tokenizer, stop=[REPLACEMENT])
    cut_off.append(token_ids[:-1])
    assert (cut_off.finish(), cut_off.text) == (REPLACEMENT, "")


def test_after_a_prompt_the_first_space_stays(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    prompt, token_ids = tokenizer.encode("the cat"), tokenizer.encode(" sat")[2:]
    assert tokenizer.decode(token_ids) == "sat"
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt)
    assert stream(detokenizer, token_ids)[-1] == " sat"
