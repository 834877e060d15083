"""The command line: what goes to stdout, what a wrong call says, what a bad line does."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jaxpage.generate import main
from tests.tiny import MODEL_DIR

ENGINE = ["--model", str(MODEL_DIR), "--num-blocks", "64", "--max-num-seqs", "4", "--quiet"]

BAD_LINES = [
    b"{not json", b"[1]", b'{"prompt": 7}', b'{"prompt": "a", "n": 2, "temperature": 0}',
    b'{"prompt": "a", "temprature": 1}', b'{"prompt": "a", "top_p": 2}', b'{"prompt": "\xff"}',
    b'{"prompt": [99999]}', b'{"messages": "hi"}', b'{"prompt": "a", "stop_token_ids": 3}',
    b'{"prompt": "a", "messages": []}', b'{"prompt": "a", "allowed_token_ids": []}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a", "seed": "7"}',
    b'{"prompt": "' + b"a" * 3000 + b'"}',
]  # fmt: skip


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_one_prompt_streams_its_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ENGINE, "Tom has a red", "--max-tokens", "8"]) == 0
    streamed = capsys.readouterr()
    assert main([*ENGINE, "Tom has a red", "--max-tokens", "8", "--no-stream"]) == 0
    assert streamed.out == capsys.readouterr().out != "\n"
    assert streamed.out.endswith("\n") and streamed.err == ""


@pytest.mark.slow
def test_jsonl_lines_come_in_input_order_and_a_bad_one_errs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    good = [
        {"prompt": "Tom has a red", "max_tokens": 9, "logprobs": 2, "prompt_logprobs": 1},
        {"prompt": [1, 5, 9], "max_tokens": 3, "temperature": 1.0, "seed": 3, "top_k": 5},
        {"prompt": "The cat", "stop": "e", "logit_bias": {"7": -100.0}, "min_tokens": 1},
        {"prompt": "", "max_tokens": 2},
    ]
    mixed = [json.dumps(good[0]).encode(), *BAD_LINES, *(json.dumps(g).encode() for g in good[1:])]
    file.write_bytes(b"\n".join(mixed) + b"\n\n")
    out = tmp_path / "out.jsonl"
    code = main([*ENGINE, "--prompts", str(file), "--format", "jsonl", "-o", str(out), "--stats"])
    found = lines(out.read_text())
    captured = capsys.readouterr()
    assert code == 1 and captured.out == ""
    assert [line["index"] for line in found] == list(range(len(mixed)))
    errors = [line for line in found if line["error"]]
    assert [line["index"] for line in errors] == list(range(1, 1 + len(BAD_LINES)))
    assert all(line["outputs"] == [] and "got " in line["error"] for line in errors)
    first, ids, stopped, empty = [line for line in found if not line["error"]]
    assert len(first["outputs"][0]["logprobs"]) == len(first["outputs"][0]["token_ids"])
    assert first["prompt_logprobs"][0] is None
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert ids["prompt"] is None and ids["prompt_token_ids"] == [1, 5, 9]
    assert "e" not in stopped["outputs"][0]["text"]
    assert empty["prompt_token_ids"] == [1], "an empty prompt runs from the begin token"
    stats = json.loads(captured.err.splitlines()[-1])
    assert stats["blocks_free"] == stats["blocks_total"] == 64
    assert stats["generated_tokens"] == sum(
        len(line["outputs"][0]["token_ids"]) for line in found if not line["error"]
    )


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["a", "--temperature", "nan"],
        ["a", "--temperature", "-1"],
        ["a", "--top-p", "0"],
        ["a", "--top-k", "-2"],
        ["a", "--max-tokens", "x"],
        ["a", "--max-tokens", "-1"],
        ["a", "-n", "2"],
        ["a", "-n", "3", "--best-of", "2", "--temperature", "1"],
        ["a", "--beam-width", "0"],
        ["a", "--beam-width", "2", "--temperature", "1"],
        ["a", "--length-penalty", "2"],
        ["a", "--early-stopping", "true"],
        ["a", "--logit-bias", "abc"],
        ["a", "--system", "be nice"],
        ["a", "--nonsense"],
        ["a", "--device", "gpu"],
        ["a", "--preemption", "maybe"],
        ["a", "--swap-blocks", "-1"],
        ["a", "--block-map", "map.bmp"],
        ["a", "--block-map", "no/such/folder/map.svg"],
        ["a", "--attention", "flash"],
        ["a", "--tensor-parallel-size", "2"],
        ["a", "--block-size", "0"],
        ["a", "--num-blocks", "0"],
        ["a", "--num-blocks", "4", "--kv-memory", "1GiB"],
        ["a", "--kv-memory", "lots"],
        ["a", "--num-blocks", "999999999"],
        ["a", "--max-model-len", "100000"],
        ["a", "--prompts", "missing.jsonl"],
        ["a", "--prompts", "prompts.csv"],
        ["a", "-o", "missing/dir/out.jsonl"],
        ["a", "--model", "/nowhere/model.gguf"],
        ["a", "--model", "not a model"],
    ],
    ids=" ".join,
)
def test_a_wrong_call_ends_with_one_line_and_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in argv else ["--model", str(MODEL_DIR)]
    try:
        code = main([*argv, *model, "--quiet"])
    except SystemExit as exit_:  # argparse's own way out
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.startswith("error: got ") and captured.err.count("\n") == 1, captured.err


def test_a_prompt_over_the_limit_fails_alone(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*ENGINE, "Tom", "a" * 4000, "--max-tokens", "4", "--format", "jsonl"]
    assert main(argv) == 1
    found = lines(capsys.readouterr().out)
    assert found[0]["error"] is None and "got a prompt of" in found[1]["error"]
    assert found[1]["prompt"] == "a" * 4000


@pytest.mark.slow
def test_bytes_that_are_no_text_err_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"Tom has\n\xff\xfe\n\nThe cat\n")
    argv = [*ENGINE, "--prompts", str(file), "--max-tokens", "3", "--format", "jsonl"]
    assert main(argv) == 1
    found = lines(capsys.readouterr().out)
    assert [bool(line["error"]) for line in found] == [False, True, False]
    assert "UTF-8" in found[1]["error"]


@pytest.mark.slow
def test_stdin_holds_prompts_or_objects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for text in (b"Tom has\n", b'{"prompt": "Tom has", "temperature": 0}\n'):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        argv = [*ENGINE, "--prompts", "-", "--format", "jsonl", "--max-tokens", "4"]
        assert main(argv) == 0
        found.append(lines(capsys.readouterr().out)[0])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    command = [sys.executable, "-m", "jaxpage.generate", *ENGINE, "Tom has", "--max-tokens", "200",
               "--ignore-eos"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full: run on Linux")
def test_a_full_disk_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ENGINE, "Tom has", "--max-tokens", "3", "-o", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "No space left" in captured.err


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxpage.engine.engine import LLMEngine

    steps, step = [0], LLMEngine.step

    def interrupted(engine: LLMEngine, *, only_finished: bool) -> Any:
        steps[0] += 1
        if steps[0] == 12:
            raise KeyboardInterrupt
        return step(engine, only_finished=only_finished)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    argv = [*ENGINE, "Tom has", "The cat", "--max-tokens", "60", "--format", "jsonl",
            "--ignore-eos", "--prompts", "-"]  # fmt: skip
    short = io.BytesIO(b'{"prompt": "One", "max_tokens": 2}\n')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(short))
    assert main(argv) == 130
    assert [line["index"] for line in lines(capsys.readouterr().out)] == [2]


@pytest.mark.slow
def test_samples_beams_and_the_map_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, prompts = tmp_path / "map.svg", tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Tom has a", "n": 2, "temperature": 0.9, "seed": 3}\n'
        '{"prompt": "Tom has a", "beam_width": 3, "max_tokens": 5, "length_penalty": 0.5}\n'
        '{"prompt": "Tom", "length_penalty": 0.5}\n'
    )
    options = ["--max-tokens", "6", "--format", "jsonl", "--quiet", "--block-size", "4"]
    limits = ["--max-num-seqs", "4", "--max-model-len", "64", "--num-blocks", "40"]
    code = main(
        ["--prompts", str(prompts), "--model", str(MODEL_DIR), "--block-map", str(picture),
         *options, *limits]
    )  # fmt: skip
    samples, beams, wrong = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert code == 1 and "without beam_width" in wrong["error"]
    assert [each["index"] for each in samples["outputs"]] == [0, 1]
    assert all(each["score"] is None for each in samples["outputs"])
    scores = [each["score"] for each in beams["outputs"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    root = ElementTree.fromstring(picture.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    tips = [tip.text or "" for tip in root.iter(f"{svg}title")]
    hatches = [each for each in root.iter(f"{svg}rect") if each.get("fill") == "url(#dark)"]
    assert len(hatches) > 1, "no block is shared but the legend's"
    assert any(tip == "cached" for tip in tips) or len(tips) > 3


def test_a_dash_means_stdout_and_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*ENGINE, "Tom has", "--max-tokens", "3", "-o", "-"]) == 0
    assert capsys.readouterr().out.strip() and list(tmp_path.iterdir()) == []


def test_only_a_failure_to_write_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("jaxpage.engine.llm.LLM.__init__", exhausted)
    assert main([*ENGINE, "Tom has", "--max-tokens", "3"]) == 1
    told = capsys.readouterr().err
    assert "Too many open files" in told and "-o" not in told and told.count("\n") == 1
