"""How text is cut before byte pairs are merged, by the name GGUF files give it.

A GGUF file holds no rule, only a name in `tokenizer.ggml.pre`; the rule has to be known.
Source of the names and expressions: `llama-vocab.cpp` of llama.cpp, and the `tokenizer.json` of
the models they stand for. Expressions apply one after the other, each to the parts that the ones
before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from jaxpage.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _SUFFIXES + _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _SUFFIXES + _WORDS + r"|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A named rule and what goes with it when the file says nothing."""

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    """A part that is a token as it stands is not merged up from its bytes."""
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule, then the mapping of bytes to printable characters."""
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_chars])


_LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), takes_whole_words=True, adds_bos=True)
_TABLE: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("gpt2 gpt-2 phi-2 mpt olmo jais trillion", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone", PreTokenizer(_DIGITS_THEN_GPT2)),
    ("llama3 llama-v3 llama-bpe falcon3 pixtral", _LLAMA3),
    ("dbrx smaug-bpe", PreTokenizer((LLAMA3_PATTERN,))),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    ("qwen2 stablelm2 deepseek-r1-qwen megrez", PreTokenizer((_QWEN2,))),
    ("tekken", PreTokenizer((_TEKKEN,), takes_whole_words=True, adds_bos=True)),
)
PRE_TOKENIZERS = {name: rule for names, rule in _TABLE for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule called `name`; CheckpointError when it is not known."""
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"got tokenizer.ggml.pre={name!r}, wanted one of {', '.join(sorted(PRE_TOKENIZERS))}; "
            "load the model's Hugging Face directory, whose tokenizer.json holds the rule itself"
        )
    return PRE_TOKENIZERS[name]
