"""A tokenizer.json as an object of the tokenizers library, its work on a text bounded.

The library runs whatever steps the file lists, in native code that nothing can interrupt: thirty
steps that double a text never end, nor does an expression that tries every way to cut a word. So
what steps do to a text's size is worked out before one runs, and then they are tried on texts that
grow slowly, while nothing takes long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jaxpage.errors import CheckpointError, RequestError
from jaxpage.reading import answering, read_bytes, reading

MOST_BYTES = 96 << 20
"""Most of a tokenizer.json; the largest known has 35 MB."""
_MOST_STEPS, _MOST_GROWTH, _MOST_ADDED = 64, 1024, 256
_WANTED = "a tokenizer that the tokenizers library reads"
_TRIALS = ("a" * 48, "aB1 '.\n\u00e9\u65e5" * 5, " " * 48, "1" * 48, "\n \t" * 16, "-!" * 24)
_TAIL = "".join(map(chr, range(32, 127)))
"""What an expression has to find somewhere before it is tried in earnest."""
_MOST_TRIAL_S = 1.0
_GROWTH = {"ByteLevel": 4, "Metaspace": 2, "BertNormalizer": 3, "Precompiled": 8}
"""How many times as long a step can make a text; 1 for those that are not here. Unicode's forms
are not: they grow no text twice."""
_LISTS = ("normalizers", "pretokenizers", "processors")
"""Where a step of steps keeps them."""


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The object of a file, without padding and truncation; CheckpointError when it can't be had
    or its work has no bound."""
    with reading(path, _WANTED):
        backend = tokenizers.Tokenizer.from_buffer(
            read_bytes(path, wanted=_WANTED, most=MOST_BYTES)
        )
        backend.no_padding()
        backend.no_truncation()
        _check_growth(path, backend)
        _try(path, backend)
    return backend


def _check_growth(path: Path, backend: tokenizers.Tokenizer) -> None:
    before = [*_steps(_state(backend.normalizer)), *_steps(_state(backend.pre_tokenizer))]
    growth, added = 1.0, 0
    for step in before:
        growth *= _growth(step)
        added = added * _growth(step) + len(step.get("prepend", ""))
        if growth > _MOST_GROWTH or added > _MOST_ADDED or len(before) > _MOST_STEPS:
            raise _unbounded(path, f"{len(before)} steps that make a text much longer")
    copies = 1
    for step in _steps(_state(backend.post_processor)):
        if step["type"] == "TemplateProcessing":
            copies *= sum("Sequence" in item for item in step["single"])
            written = max((len(each["ids"]) for each in step["special_tokens"].values()), default=0)
            if copies > 1 or len(step["single"]) * max(1, written) > _MOST_ADDED:
                raise _unbounded(path, "a post-processor that repeats the text")


def _try(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Texts that grow by two characters, so that what doubles with each is seen in time."""
    began = time.thread_time()
    for text in _TRIALS:
        for size in range(0, len(text) + 1, 2):
            before = time.thread_time()
            try:
                with answering("a trial", wanted="ids", do="take another text"):
                    backend.encode(text[:size] + _TAIL)
            except RequestError as error:  # a text that it refuses fails a request, not the file
                is_endless = "retry-limit" in str(error)
            else:
                now = time.thread_time()
                is_endless = now - before > _MOST_TRIAL_S / 8 or now - began > _MOST_TRIAL_S
            if is_endless:
                raise _unbounded(path, f"steps that take too long for {size} characters")


def _growth(step: dict[str, Any]) -> float:
    if step["type"] != "Replace":
        return _GROWTH.get(step["type"], 1)
    pattern = step["pattern"].get("String")
    if not pattern:  # an expression may match nothing, so between any two characters
        return 1 + len(step["content"])
    return max(1.0, len(step["content"]) / len(pattern))


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps in a step, those of sequences one after the other."""
    if step is None:
        return
    inner = next((step[key] for key in _LISTS if isinstance(step.get(key), list)), None)
    if inner is None or step["type"] != "Sequence":
        yield step
        return
    for each in inner:
        yield from _steps(each)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _unbounded(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"got {path} with {what}, wanted a tokenizer whose work on a text is bounded; "
        "download it again"
    )
