"""What is free, as the system and the container say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage import memory


class Device:
    """Says what it is told to."""

    def __init__(self, stats: dict[str, int] | None) -> None:
        self.stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


@pytest.mark.parametrize(
    ("stats", "wanted"),
    [
        ({"bytes_limit": 30, "bytes_in_use": 20}, 10),
        ({"bytes_limit": 30}, 30),
        ({"bytes_in_use": 20}, 7),
        (None, 7),
    ],
)
def test_a_device_without_a_limit_lives_on_the_host(
    stats: dict[str, int] | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "default_device", lambda: Device(stats))
    monkeypatch.setattr(memory, "available_bytes", lambda: 7)
    assert memory.free_bytes() == wanted


def test_meminfo_and_the_container_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   4096 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes() == 4096 * 1024
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    for limit, wanted in (("max\n", 4096 * 1024), ("10000\n", 7500), ("100\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory.available_bytes() == wanted


def test_without_meminfo_sysconf_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    found = memory.available_bytes()
    assert found is None or found > 0
