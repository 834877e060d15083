"""The command line: exit codes, one line for a mistake, help whose examples are real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert.__main__ import main
from jaxpage.formats.model import open_model
from tests.helpers.formats import variant, write_gguf, write_hf


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_conversion_there_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_hf(variant("gqa"), tmp_path / "source")
    code, out, err = run(capsys, source, tmp_path / "orbax", "--dtype", "bfloat16")
    assert (code, out) == (0, "")
    assert "warning: " in err  # it has no tokenizer
    assert f"wrote {tmp_path / 'orbax'}" in err
    assert run(capsys, tmp_path / "orbax", tmp_path / "hf", "--to", "hf")[0] == 0
    assert open_model(tmp_path / "hf").config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "SRC"),
        (("x",), "DST"),
        (("x", "y", "--dtype", "int8"), "int8"),
        (("x", "y", "--frobnicate"), "frobnicate"),
        (("nothing", "y"), "nothing"),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: got .*, wanted .*\n", err), err
    assert said in err


def test_an_existing_destination_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = write_hf(variant("gqa"), tmp_path / "source")
    assert run(capsys, source, tmp_path / "out")[0] == 0
    code, _, err = run(capsys, source, tmp_path / "out")
    assert code == 2
    assert re.fullmatch(r"error: got destination .*--overwrite\n", err)
    assert run(capsys, source, tmp_path / "out", "--overwrite")[0] == 0


def test_a_place_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = write_hf(variant("gqa"), tmp_path / "source")
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, source, tmp_path / "file" / "out")
    assert code == 2
    assert re.fullmatch(r"error: got .*, wanted .*\n", err), err


def test_ctrl_c(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.run.convert", interrupt)
    assert run(capsys, "x", tmp_path)[0] == 130


def test_ctrl_c_while_modules_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(name: str, *_: object) -> None:
        if name == "convert.run":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "convert.run", raising=False)
    finder = type("Interrupted", (), {"find_spec": staticmethod(interrupted)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert run(capsys, "x", tmp_path / "out")[::2] == (130, "interrupted: nothing was written\n")


def test_help_examples_are_calls_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    from convert.__main__ import _parser

    code, out, _ = run(capsys, "--help")
    assert code == 0
    examples = re.findall(r"python -m convert (.*?)(?:  +.*)?$", out.split("examples:")[1], re.M)
    assert len(examples) == 4
    for example in examples:
        options = _parser().parse_args(example.split())
        assert options.source


@pytest.mark.slow
def test_as_a_command_it_shows_progress_and_no_noise(tmp_path: Path) -> None:
    write_gguf(variant("gqa"), tmp_path / "model.gguf")
    done = subprocess.run(
        [sys.executable, "-m", "convert", "model.gguf", "out"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "tensor/s" in done.stderr
    lines = [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()]
    plain = [line.strip() for line in lines if "tensor/s" not in line]
    assert plain == [
        "warning: model.gguf has no tokenizer; only token ids can be used",
        "wrote out",
    ]
