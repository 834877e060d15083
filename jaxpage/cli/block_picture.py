"""Draws the pool step by step as SVG: a column a step, a line a block, a colour a sequence.

Runs of steps in which a block stays as it is are one rectangle, so that the file stays small.
"""

from __future__ import annotations

import colorsys
import html
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import groupby
from pathlib import Path

from jaxpage.errors import ConfigError
from jaxpage.host.block_map import BlockMap, MappedBlock

MOST_COLUMNS = 600
"""Of more steps, so many are drawn, evenly spread."""
MOST_NAMES = 24
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 480, 60, 60, 190, 40
FREE, CACHED, HELD = "#ffffff", "#d0d0d0", "#8a8a8a"
GOLDEN = 0.618034


def check_picture_name(name: str) -> None:
    """ConfigError for a picture that can't be drawn."""
    if not name.endswith(".svg"):
        raise ConfigError(f"got --block-map {name}, wanted a file that ends in .svg; rename it")


def draw_blocks(name: str, history: Seq[BlockMap]) -> None:
    """Writes the picture of a pool's history, one map a step. Raises OSError."""
    check_picture_name(name)
    Path(name).write_text(block_svg(history), encoding="utf-8")


def block_svg(history: Seq[BlockMap]) -> str:
    """The picture as SVG text."""
    stride = -(-len(history) // MOST_COLUMNS)
    maps = history[::stride]
    num_blocks = len(maps[0].blocks)
    cell_w = (WIDTH - LEFT - RIGHT) / len(maps)
    cell_h = (HEIGHT - TOP - BOTTOM) / num_blocks
    parts = [*_head(history, num_blocks), *_axes(len(history), num_blocks)]
    for index in range(num_blocks):
        column = 0
        for block, run in groupby(maps, key=lambda entry: _look(entry.blocks[index])):
            count = len(list(run))
            x, y = LEFT + column * cell_w, TOP + index * cell_h
            parts += _rectangles(block, x, y, count * cell_w, cell_h)
            column += count
    parts += _legend(maps)
    return "\n".join([*parts, "</svg>", ""])


def _look(block: MappedBlock) -> tuple[str, str, bool]:
    """(colour, tooltip, whether it is shared)."""
    if block.kind == "owned":
        owners = ", ".join(str(seq_id) for seq_id in block.seq_ids)
        return _colour(block.seq_ids[0]), f"sequences {owners}", len(block.seq_ids) > 1
    colours = {"free": FREE, "cached": CACHED, "held": HELD}
    return colours[block.kind], block.kind, False


def _colour(seq_id: int) -> str:
    """Neighbouring ids get far hues."""
    red, green, blue = colorsys.hls_to_rgb(seq_id * GOLDEN % 1, 0.6, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _rectangles(
    look: tuple[str, str, bool], x: float, y: float, width: float, height: float
) -> Iterator[str]:
    colour, tooltip, is_shared = look
    if colour == FREE:
        return
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{max(height - 0.4, 0.6):.2f}"'
    yield f'<rect {place} fill="{colour}"><title>{html.escape(tooltip)}</title></rect>'
    if is_shared:
        yield f'<rect {place} fill="url(#shared)" pointer-events="none"/>'


def _head(history: Seq[BlockMap], num_blocks: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    yield (
        '<defs><pattern id="shared" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="5" fill="#000" '
        'fill-opacity="0.55"/></pattern></defs>'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    size = history[0].block_size
    yield f'<text x="{LEFT}" y="24" font-size="16">Who owns which block of the KV pool</text>'
    yield (
        f'<text x="{LEFT}" y="44" fill="#555">{num_blocks} blocks of {size} tokens, '
        f"{len(history)} steps</text>"
    )


def _axes(num_steps: int, num_blocks: int) -> Iterator[str]:
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
    )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        step, block = round(share * num_steps), max(1, round(share * num_blocks))
        x, y = LEFT + share * width, TOP + share * height
        yield f'<text x="{x:.0f}" y="{TOP + height + 16}" text-anchor="middle">{step}</text>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{block}</text>'
    yield f'<text x="{LEFT + width / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'
    yield (
        f'<text transform="translate(14 {TOP + height / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">block</text>'
    )


def _legend(maps: Seq[BlockMap]) -> Iterator[str]:
    """What the colours mean, the sequences in order; of many, the first."""
    x, y = WIDTH - RIGHT + 16, TOP
    seen = {seq_id for entry in maps for block in entry.blocks for seq_id in block.seq_ids}
    ids = sorted(seen)
    looks: list[tuple[tuple[str, str, bool], str]] = [
        ((CACHED, "", False), "cached, nobody's now"),
        ((HELD, "", False), "held by a step under way"),
        ((_colour(ids[0]) if ids else HELD, "", True), "shared by several"),
        *(((_colour(i), "", False), f"sequence {i}") for i in ids[:MOST_NAMES]),
    ]
    for look, name in looks:
        yield from _rectangles(look, x, y, 12, 12)
        yield f'<text x="{x + 18}" y="{y + 11}">{name}</text>'
        y += 15
    if len(ids) > MOST_NAMES:
        yield f'<text x="{x + 18}" y="{y + 11}">and {len(ids) - MOST_NAMES} more</text>'
