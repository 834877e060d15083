"""A destination is whole or not there, and nothing else is ever replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.aside import written_aside
from jaxpage.errors import CheckpointError


def write(destination: Path, text: str, *, overwrite: bool = False) -> None:
    with written_aside(destination, overwrite=overwrite) as directory:
        assert not any(directory.iterdir())
        (directory / "config.json").write_text(text)


def test_the_directory_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with written_aside(target, overwrite=False) as directory:
        (directory / "config.json").write_text("new")
        assert not target.exists()
    assert (target / "config.json").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_overwrite_replaces_the_whole_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, "old")
    (target / "more.txt").write_text("old")
    write(target, "new", overwrite=True)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"config.json": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_what_was_there(
    overwrite: bool, error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    if overwrite:
        write(target, "old")
    with pytest.raises(error), written_aside(target, overwrite=overwrite) as directory:
        (directory / "config.json").write_text("half")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if overwrite else [])
    assert not overwrite or (target / "config.json").read_text() == "old"


def test_a_failing_rename_puts_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    write(target, "old")
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise PermissionError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError):
        write(target, "new", overwrite=True)
    assert (target / "config.json").read_text() == "old"


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "new")


@pytest.mark.parametrize(
    ("name", "overwrite", "said"),
    [("model", False, "--overwrite"), ("home", True, "holds no model"), ("file", True, "the file")],
)
def test_what_may_not_be_replaced(name: str, overwrite: bool, said: str, tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError, match=said):
        write(tmp_path / name, "new", overwrite=overwrite)
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "model" / "config.json").read_text() == "old"
