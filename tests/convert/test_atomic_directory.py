"""A destination is whole or not there, and nothing else is ever replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convert.atomic_directory import atomic_directory
from jaxpage.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def write(destination: Path, text: str, *, overwrite: bool = False) -> list[str]:
    told: list[str] = []
    with atomic_directory(destination, overwrite=overwrite, tell=told.append) as directory:
        assert not any(directory.iterdir())
        (directory / "config.json").write_text(text)
        (directory / "params").mkdir()
        (directory / "params" / "x").write_text(text)
    return told


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def model(text: str) -> dict[str, str]:
    return {"config.json": text, "params/x": text}


def test_the_directory_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with atomic_directory(target, overwrite=False, tell=print) as directory:
        (directory / "config.json").write_text("new")
        assert not target.exists()
    assert (target / "config.json").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_overwrite_replaces_the_whole_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, "old")
    (target / "more.txt").write_text("old")
    write(target, "new", overwrite=True)
    assert content(target) == model("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_what_was_there(
    overwrite: bool, error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    if overwrite:
        write(target, "old")
    with (
        pytest.raises(error),
        atomic_directory(target, overwrite=overwrite, tell=print) as directory,
    ):
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
        if path.parent.name == "new":
            raise PermissionError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError):
        write(target, "new", overwrite=True)
    monkeypatch.undo()
    assert content(target) == model("old")


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


def test_what_a_link_points_at_is_written(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    for name, target in (("link", "big"), ("dangling", "deep/later"), ("up", "link/../../up2")):
        (tmp_path / name).symlink_to(target)
    for name in ("link", "dangling"):
        write(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
    assert content(tmp_path / "big") == model("link")
    assert content(tmp_path / "deep" / "later") == model("dangling")
    write(tmp_path / "link", "new", overwrite=True)
    assert content(tmp_path / "big") == model("new")


def test_a_directory_keeps_its_place(tmp_path: Path) -> None:
    """So a mount point can be written, and a shell that stands in it sees what came."""
    target = tmp_path / "model"
    target.mkdir(mode=0o700)
    (target / "lost+found").mkdir()
    before = target.stat().st_ino
    for text in ("old", "new"):
        write(target, text, overwrite=True)
        assert content(target) == model(text)
        assert sorted(path.name for path in target.iterdir()) == [
            "config.json",
            "lost+found",
            "params",
        ]
    assert (target.stat().st_ino, target.stat().st_mode & 0o777) == (before, 0o700)


@pytest.fixture
def impossible(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").write_text("text")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "away").symlink_to("file/model")
    return {
        "in a file": tmp_path / "file" / "model",
        "deep in a file": tmp_path / "file" / "a" / "b",
        "circle": tmp_path / "circle",
        "link into a file": tmp_path / "away",
        "long name": tmp_path / ("n" * 256),
        "long parent": tmp_path / ("n" * 256) / "model",
        "long path": tmp_path.joinpath(*["n" * 200] * 30),
        "root": Path("/"),
        "device": Path("/dev/null"),
        "proc": Path("/proc/model"),
        "null": tmp_path / "a\0b",
    }


@pytest.mark.parametrize(
    "kind",
    [
        "in a file",
        "deep in a file",
        "circle",
        "link into a file",
        "long name",
        "long parent",
        "long path",
        "root",
        "device",
        "proc",
        "null",
    ],
)
def test_what_cannot_be_put_in_place_is_refused_first(
    kind: str, impossible: dict[str, Path], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(CheckpointError, match=r"got (the file|a )?.*wanted"),
        atomic_directory(impossible[kind], overwrite=False, tell=print),
    ):
        pytest.fail("the work began")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 255), "new")
    write(tmp_path / ("ü" * 127), "new")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        write(tmp_path / "shut" / "model", "new")


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("by_link", [False, True])
def test_the_later_of_two_at_once_is_refused(exists: bool, by_link: bool, tmp_path: Path) -> None:
    target = tmp_path / "model"
    if exists:
        target.mkdir()
    (tmp_path / "link").symlink_to("model")
    with atomic_directory(target, overwrite=False, tell=print) as directory:
        (directory / "config.json").write_text("first")
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            write(tmp_path / "link" if by_link else target, "second", overwrite=True)
    assert content(target) == {"config.json": "first"}
    write(target, "third", overwrite=True)
    assert content(target) == model("third")


KILLED = """
import os, sys
from pathlib import Path
from convert.atomic_directory import atomic_directory
rename, left = Path.rename, int(sys.argv[2])
def dying(path, to):
    global left
    if not left:
        os._exit(9)
    left -= 1
    return rename(path, to)
Path.rename = dying
with atomic_directory(Path(sys.argv[1]), overwrite=True, tell=print) as new:
    (new / "config.json").write_text("new")
    (new / "stray.txt").write_text("new")
    if left < 0:
        os._exit(9)
"""


def killed(target: Path, after: int) -> int:
    """A conversion that dies after so many renames, or, for -1, before the first."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), str(after)],
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    return done.returncode


@pytest.mark.parametrize("after", range(-1, 6))
def test_a_killed_conversion_is_mended_by_the_next(after: int, tmp_path: Path) -> None:
    """Three renames take the old model away, two bring the new one: it is whole, or said not to be.

    The sixth is never made: the conversion ends well.
    """
    old = tmp_path / "model"
    write(old, "old")
    assert killed(old, after) == (9 if after < 5 else 0)
    is_new = after >= 5
    if (old / "config.json").exists():
        shown = {name: text for name, text in content(old).items() if not name.startswith(".")}
        assert shown == ({"config.json": "new", "stray.txt": "new"} if is_new else model("old"))
    told: list[str] = []
    with (
        pytest.raises(RuntimeError),
        atomic_directory(old, overwrite=True, tell=told.append),
    ):
        raise RuntimeError
    assert content(old) == ({"config.json": "new", "stray.txt": "new"} if is_new else model("old"))
    assert [line for line in told if "killed" in line] == told
    assert len(told) == (0 if is_new else 1)


def test_what_a_killed_first_conversion_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert killed(target, 0) == 9
    assert not target.exists()
    [left] = tmp_path.iterdir()
    [said] = write(target, "new")
    assert str(left) in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    shutil.rmtree(target)
    assert killed(target, 0) == 9
    target.mkdir()
    assert len(write(target, "newer")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_older_versions_left_is_removed_but_nothing_else(tmp_path: Path) -> None:
    for name in (".model.a1b2c3d4.unfinished", ".model.x.a1b2c3d4.unfinished", ".model.bak"):
        (tmp_path / name / "old").mkdir(parents=True)
        (tmp_path / name / "old" / "config.json").write_text("old")
    with pytest.raises(CheckpointError, match="--overwrite"):  # it was given back
        write(tmp_path / "model", "new")
    assert content(tmp_path / "model") == {"config.json": "old"}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".model.bak", ".model.x.a1b2c3d4.unfinished", "model"]
