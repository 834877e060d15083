"""The command line's own process: streams that are closed, narrow, or interrupted."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys

import pytest

from jaxpage.cli.writers import JsonlWriter, Output
from jaxpage.outputs import CompletionOutput, RequestOutput
from tests.tiny import MODEL_DIR

CALL = [sys.executable, "-m", "jaxpage.generate", "--model", str(MODEL_DIR), "--quiet",
        "--num-blocks", "16", "--max-num-seqs", "1", "--max-tokens", "2"]  # fmt: skip


def shell(ending: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The call with a shell's redirections after it."""
    script = f'"$@" {ending}'
    return subprocess.run(
        ["sh", "-c", script, "sh", *CALL, *argv], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("ending", "argv", "code", "said"),
    [
        (">&-", ["Tom"], 2, "error: got a closed standard output"),
        ("<&-", ["--prompts", "-"], 2, "error: got --prompts - and no standard input"),
        ("2>&-", ["--top-p", "2", "Tom"], 2, ""),
    ],
)
def test_a_closed_stream_is_told_in_one_line_where_it_can_be(
    ending: str, argv: list[str], code: int, said: str
) -> None:
    ended = shell(ending, *argv)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(said) and ended.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(("encoding", "prompt"), [("ascii", "caf\u00e9"), ("utf-8", "caf\udce9")])
def test_what_the_output_cannot_encode_is_escaped(encoding: str, prompt: str) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    JsonlWriter(Output(narrow)).write(0, RequestOutput("0", prompt, (1,), (), finished=True))
    assert isinstance(narrow.buffer, io.BytesIO)
    assert json.loads(narrow.buffer.getvalue())["prompt"] == prompt


def test_what_json_cannot_say_is_null() -> None:
    file = io.StringIO()
    blown_up = CompletionOutput(0, "a", (5,), -math.inf, None, "length", None, score=-math.inf)
    JsonlWriter(Output(file)).write(0, RequestOutput("0", "a", (1,), (blown_up,), finished=True))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (found,) = json.loads(file.getvalue(), parse_constant=refuse)["outputs"]
    assert found["score"] is None and found["cumulative_logprob"] is None
