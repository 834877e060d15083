"""The README's Python runs as it stands, and its options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpage.cli.options import build_parser

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_there_are_snippets_of_the_library_and_of_the_core() -> None:
    assert any("LLM(" in snippet for snippet in SNIPPETS)
    assert any("jp.forward(" in snippet for snippet in SNIPPETS)


def test_every_option_that_is_named_exists() -> None:
    known = set(build_parser()._option_string_actions) | {
        "--to", "--no-deps", "--sample", "--only", "--no-live", "--target",  # other commands'
    }  # fmt: skip
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known
