"""Names to paths; the Hub is only asked for what is named as its own."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxpage.config import DEFAULT_MODEL
from jaxpage.errors import CheckpointError
from jaxpage.formats.locate import locate


class Hub:
    """Stands for the Hub: a snapshot holds the files that match and exist there."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, files
        self.asked: list[str] = []

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        self.asked.append(repo_id)
        for name in self.files:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (self.folder / name).write_text("")
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path, ["config.json", "model.safetensors", "pytorch_model.bin"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_an_existing_path_wins_over_a_hub_id(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == Path("org/name")
    assert not hub.asked


def test_a_hub_id_is_fetched_without_the_second_copy(hub: Hub) -> None:
    assert locate("org/name") == hub.folder
    assert hub.asked == ["org/name"]
    assert {path.name for path in hub.folder.iterdir()} == {"config.json", "model.safetensors"}


def test_bin_files_are_fetched_where_there_is_nothing_newer(hub: Hub) -> None:
    hub.files.remove("model.safetensors")
    locate("org/name")
    assert {path.name for path in hub.folder.iterdir()} == {"config.json", "pytorch_model.bin"}


@pytest.mark.parametrize(
    "name", ["nothing", "./lost/dir", "../lost", "/lost/dir", "a/b/c", "a/", ""]
)
def test_other_names_never_ask_the_hub(name: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="an existing path or a Hub id"):
        locate(name if name else tmp_path / "lost")
    assert not hub.asked


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_what_no_file_system_can_look_up_is_refused(name: str, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="which can't be looked up"):
        locate(name)
    assert not hub.asked


def test_an_unreachable_hub_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot reach it.\nCheck your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"'org/name'.*Cannot reach it\.") as error:
        locate("org/name")
    assert "\n" not in str(error.value)


def test_the_default_model_comes_from_the_hub_where_it_is_not_installed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert locate(DEFAULT_MODEL) == hub.folder
    assert hub.asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@pytest.mark.weights
def test_the_default_model_comes_from_its_package(hub: Hub) -> None:
    path = locate(DEFAULT_MODEL)
    assert path.suffix == ".gguf"
    assert path.exists()
    assert not hub.asked
