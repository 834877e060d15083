"""The picture of the pool: every kind of block looks its own way, colours are of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage.cli import block_picture
from jaxpage.cli.block_picture import CACHED, COMMON, HELD, block_svg
from jaxpage.errors import ConfigError
from jaxpage.outputs import BlockMap, MappedBlock

REQUEST_OF = {1: "a", 2: "a", 3: "b"}


def picture(*blocks: MappedBlock) -> str:
    """Of one step, without the legend."""
    svg = block_svg([BlockMap(16, blocks, REQUEST_OF)])
    return svg.partition("A block is")[0]


def owned(*seq_ids: int) -> MappedBlock:
    return MappedBlock("owned", seq_ids)


def test_samples_of_a_request_have_its_colour_and_other_requests_another() -> None:
    fills = {line.split('fill="')[1][:7] for line in picture(owned(1), owned(2)).splitlines()
             if "<title>request a</title>" in line}  # fmt: skip
    assert len(fills) == 1 and "<title>request b</title>" in picture(owned(3))
    assert not any(f'{fill}"><title>request b' in picture(owned(1), owned(3)) for fill in fills)


def test_sharing_is_hatched_and_of_several_requests_it_has_no_requests_colour() -> None:
    assert 'fill="url(#dark)"' not in picture(owned(1))
    assert 'fill="url(#dark)"' in picture(owned(1, 2))
    common = picture(owned(2, 3))
    assert f'fill="{COMMON}"><title>request a, b</title>' in common
    assert 'fill="url(#light)"' in common


def test_blocks_of_nobody_are_cached_held_or_not_drawn() -> None:
    svg = picture(MappedBlock("cached"), MappedBlock("held"), owned(9), MappedBlock("free"))
    assert svg.count(f'fill="{CACHED}"><title>cached') == 1
    assert svg.count(f'fill="{HELD}"><title>held') == 2  # 9 has ended
    assert svg.count("<title>") == 3


def test_png_is_drawn_where_its_library_is_and_asks_for_it_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: dict[str, object] = {}

    class Cairo:
        @staticmethod
        def svg2png(bytestring: bytes, *, write_to: str, scale: float) -> None:
            wrote[write_to] = bytestring

    history = [BlockMap(4, (MappedBlock("free"),))]
    name = str(tmp_path / "map.png")
    monkeypatch.setattr(block_picture, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"\[png\]"):
        block_picture.draw_blocks(name, history)
    monkeypatch.setattr(block_picture, "find_spec", lambda _: object())
    monkeypatch.setattr(block_picture, "import_module", lambda _: Cairo)
    block_picture.draw_blocks(name, history)
    assert wrote[name] == block_svg(history).encode()
