"""What every tokenizer promises, whatever file it came from.

Knows nothing of files, models or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class ChatPrompt(str):
    """What a chat template wrote: the whole prompt, with all its special tokens.

    This package's tokenizers add nothing to it unless told to. Results of str's own methods, a
    concatenation too, are plain text again.
    """

    __slots__ = ()


@runtime_checkable
class TextStream(Protocol):
    """Text of one growing list of ids. What `push` returned is never taken back."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this id; empty while a character is half there."""
        ...

    @property
    def pending(self) -> str:
        """What the text would end with if no id followed."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    Special tokens written in a text ("<|im_end|>") become their ids, as in Hugging Face
    tokenizers: the caller has to clean untrusted text.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, as far as the tokenizer's own files tell."""
        ...

    @property
    def bos_token(self) -> str: ...

    @property
    def eos_token(self) -> str: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids whose text `skip_special_tokens` leaves out."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. BOS, where the model wants one, comes first and exactly once, also
        when the text begins with it already (Hugging Face then gives two).

        Tokenizers of ours add nothing to a `ChatPrompt` unless `add_special_tokens` is given.
        Raises RequestError for a text that can't be encoded."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Ids without a token are dropped."""
        ...

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for one sequence, fed id by id; its text adds up to `decode` of all ids."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a tokenizer's files say beside its vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of the tokens by their role: bos_token, eos_token, unk_token, pad_token, ..."""
    adds_bos: bool = False
    chat_template: str | None = None
    additional_special_tokens: tuple[str, ...] = ()
    """Texts of special tokens without a role."""


class DescribedTokenizer:
    """The part of a tokenizer that follows from its info and its stream."""

    def __init__(self, info: TokenizerInfo) -> None:
        self.info = info

    @property
    def bos_token_id(self) -> int | None:
        return self.info.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.info.eos_token_ids

    @property
    def bos_token(self) -> str:
        return self.info.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        return self.info.special_tokens.get("eos_token", "")

    @property
    def special_tokens(self) -> dict[str, str | list[str]]:
        """Special tokens as chat templates see them: each role's text, and the list of others."""
        extra = list(self.info.additional_special_tokens)
        return {
            **self.info.special_tokens,
            **({"additional_special_tokens": extra} if extra else {}),
        }

    @property
    def chat_template(self) -> str | None:
        return self.info.chat_template

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.pending

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        raise NotImplementedError

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        """`token_ids` without the surplus when they begin with BOS more than once."""
        first = 0
        while token_ids[first : first + 2] == [self.info.bos_token_id] * 2:
            first += 1
        return token_ids[first:]


def adds_special_tokens(text: str, asked: bool | None) -> bool:
    """Whether special tokens go before `text`: as the caller asked; by default, unless a chat."""
    return not isinstance(text, ChatPrompt) if asked is None else asked
