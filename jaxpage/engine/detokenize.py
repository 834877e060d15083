"""Text of one sequence while it grows, cut where a stop string begins.

Two promises: text that was shown is never taken back, and in the end it equals the whole decode
of the ids. So what a later token may still change (half a character, the beginning of a stop
string) is held until it is decided. Knows nothing of requests and steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxpage.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """One sequence's text. The end token is not handed to it when its text is not wanted.

    `stop`: strings that end the text; the one that begins first wins, and of two that begin at the
    same place the one listed first (vLLM takes the first listed that is anywhere in the new text).
    `min_tokens`: a stop string that ends within the text of this many first tokens does not count.
    `prompt_token_ids`: with them the text continues the prompt's, so a sentencepiece text keeps
    the space at its start; without, it equals `decode(token_ids)`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        self.text = ""
        """What may be shown; it only grows."""
        self.num_tokens = 0
        """Ids taken in, with the one that completed a stop string and none after it."""
        self._stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._has_stop = len(stop) > 0
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._is_finished = False
        for token_id in prompt_token_ids:
            self._stream.push(token_id)

    def append(self, token_ids: Iterable[int]) -> str | None:
        """Takes ids in; returns the stop string that ends the text, and then ignores the rest."""
        assert not self._is_finished, "ids after the end of the text"
        for token_id in token_ids:
            self.num_tokens += 1
            certain = self._stream.push(token_id)
            if not self._has_stop:
                self.text += certain
            elif (found := self._take(certain, self._stream.pending)) is not None:
                return found
        return None

    def finish(self) -> str | None:
        """Shows what was held, as no id follows; returns a stop string that this completed."""
        if self._matcher.found is None and not self._is_finished:
            self._take(self._stream.pending, "")
            self.text += self._matcher.release()
        self._is_finished = True
        return self._matcher.found

    def _take(self, certain: str, pending: str) -> str | None:
        # Half a character is pending as U+FFFD, which no stop string may match.
        likely = "" if _REPLACEMENT in pending else pending
        if self.num_tokens <= self._min_tokens:
            self.text += self._matcher.pass_over(certain, likely)
        else:
            self.text += self._matcher.feed(certain, likely)
        return self._matcher.found


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may begin one.

    Stops "\\n" and "Alice:", token by token:

        feed("Hi ")   shows "Hi "    holds ""
        feed("Ali")   shows ""       holds "Ali"
        feed("ce!")   shows "Alice!" holds ""
        feed("A\\n")   shows "A"      found is "\\n"
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self.found: str | None = None
        self._stop = tuple(stop)
        self._longest = max((len(each) for each in self._stop), default=1) - 1
        """Characters of the longest stop string that can be there without the rest of it."""
        self._include_stop = include_stop
        self._held = ""
        self._passed_over = 0
        """Characters from the start of `_held` in which no stop string may end."""

    def feed(self, text: str, likely: str = "") -> str:
        """The text that can be shown now.

        `likely` is what follows `text` if nothing changes it: searched, but not shown unless a
        stop string ends in it, which makes it final.
        """
        assert self.found is None, f"text {text!r} after the stop string {self.found!r}"
        self._held += text
        match = self._first_match(self._held + likely)
        if match is None:
            return self._let_through()
        start, self.found = match
        end = start + len(self.found) if self._include_stop else start
        shown = (self._held + likely)[:end]
        self._held = ""
        return shown

    def pass_over(self, text: str, likely: str = "") -> str:
        """As `feed`, but a stop string that ends in this text does not count."""
        self._held += text
        self._passed_over = len(self._held) + len(likely)
        return self._let_through()

    def release(self) -> str:
        """All that is held, for the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [
            (start, stop)
            for stop in self._stop
            if (start := text.find(stop, max(0, self._passed_over - len(stop) + 1))) >= 0
        ]
        return min(found, key=lambda match: match[0], default=None)

    def _let_through(self) -> str:
        """Keeps the longest end of the held text that may begin a stop string."""
        held, size = self._held, len(self._held)
        cut = max(0, size - self._longest)
        while cut < size and not any(stop.startswith(held[cut:]) for stop in self._stop):
            cut += 1
        shown, self._held = held[:cut], held[cut:]
        self._passed_over = max(0, self._passed_over - cut)
        return shown
