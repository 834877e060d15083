"""Draws the pool step by step as SVG: a column a step, a line a block, a colour a request.

Runs of steps in which a block stays as it is are one rectangle, so that the file stays small.

    plain colour        one sequence of that request
    colour, hatched     several samples or beams of that request
    black, hatched      several requests
    grey, dots, white   cached; given up, but a step still touches it; free
"""

from __future__ import annotations

import colorsys
import html
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from jaxpage.errors import ConfigError
from jaxpage.outputs import BlockMap, MappedBlock

MOST_COLUMNS = 600
"""Of more steps, so many are drawn, evenly spread."""
MOST_NAMES = 16
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 960, 480, 60, 60, 190, 40
FREE, CACHED, HELD, COMMON = "#ffffff", "#dcdcdc", "url(#held)", "#303030"
GOLDEN = 0.618034
Look = tuple[str, str, bool]
"""(colour, tooltip, whether it is shared)."""


def check_picture_name(name: str) -> None:
    """ConfigError for a picture that can't be drawn: before the work, not after it."""
    if not name.endswith((".svg", ".png")):
        raise ConfigError(f"got --block-map {name}, wanted a file in .svg or .png; rename it")
    folder = Path(name).parent
    if not folder.is_dir():
        raise ConfigError(f"got --block-map {name}, wanted a folder that exists; make {folder}")
    if name.endswith(".png") and find_spec("cairosvg") is None:
        raise ConfigError(
            f"got --block-map {name} without cairosvg, wanted it for .png; "
            'pip install ".[png]", or name an .svg file'
        )


def draw_blocks(name: str, history: Seq[BlockMap]) -> None:
    """Writes the picture of a pool's history, one map a step. Raises ConfigError, OSError."""
    check_picture_name(name)
    svg = block_svg(history)
    if name.endswith(".svg"):
        Path(name).write_text(svg, encoding="utf-8")
    else:
        import_module("cairosvg").svg2png(bytestring=svg.encode(), write_to=name, scale=2)


def block_svg(history: Seq[BlockMap]) -> str:
    """The picture as SVG text."""
    stride = -(-len(history) // MOST_COLUMNS)
    maps = history[::stride]
    names = [name for entry in history for _, name in sorted(entry.request_of.items())]
    colours = {name: _colour(place) for place, name in enumerate(dict.fromkeys(names))}
    num_blocks = len(maps[0].blocks)
    cell_w = (WIDTH - LEFT - RIGHT) / len(maps)
    cell_h = (HEIGHT - TOP - BOTTOM) / num_blocks
    parts = [*_head(history, num_blocks), *_axes(len(history), num_blocks)]
    for index in range(num_blocks):
        column = 0
        looks = [_look(entry.blocks[index], entry.request_of, colours) for entry in maps]
        for look, run in groupby(looks):
            count = len(list(run))
            x, y = LEFT + column * cell_w, TOP + index * cell_h
            parts += _rectangles(look, x, y, count * cell_w, cell_h)
            column += count
    parts += _legend(colours)
    return "\n".join([*parts, "</svg>", ""])


def _look(block: MappedBlock, request_of: Mapping[int, str], colours: Mapping[str, str]) -> Look:
    if block.kind == "owned":
        # a sequence that has ended but waits for a step to be read has no request
        owners = sorted({request_of[i] for i in block.seq_ids if i in request_of})
        if not owners:
            return HELD, "held", False
        colour = colours[owners[0]] if len(owners) == 1 else COMMON
        return colour, f"request {', '.join(owners)}", len(block.seq_ids) > 1
    kinds = {"free": FREE, "cached": CACHED, "held": HELD}
    return kinds[block.kind], block.kind, False


def _colour(place: int) -> str:
    """A colour for each place; neighbours get hues far apart."""
    red, green, blue = colorsys.hls_to_rgb(place * GOLDEN % 1, 0.6, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _rectangles(look: Look, x: float, y: float, width: float, height: float) -> Iterator[str]:
    colour, tooltip, is_shared = look
    if colour == FREE:
        return
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{max(height - 0.4, 0.6):.2f}"'
    yield f'<rect {place} fill="{colour}"><title>{html.escape(tooltip)}</title></rect>'
    if is_shared:
        hatch = "light" if colour == COMMON else "dark"
        yield f'<rect {place} fill="url(#{hatch})" pointer-events="none"/>'


def _head(history: Seq[BlockMap], num_blocks: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    stripes = 'width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    yield "<defs>"
    for name, ink in (("dark", "#000"), ("light", "#fff")):
        yield (
            f'<pattern id="{name}" {stripes}><rect width="1.6" height="5" fill="{ink}" '
            'fill-opacity="0.6"/></pattern>'
        )
    yield (
        '<pattern id="held" width="4" height="4" patternUnits="userSpaceOnUse">'
        '<rect width="4" height="4" fill="#f4f4f4"/><circle cx="2" cy="2" r="0.7" fill="#888"/>'
        "</pattern></defs>"
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
    yield (
        f'<text x="{LEFT + width / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        "step of the engine</text>"
    )
    yield (
        f'<text transform="translate(14 {TOP + height / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">block of the pool</text>'
    )


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    """What the looks mean, then the requests in the order they ran; of many, the first."""
    x, y = WIDTH - RIGHT + 16, TOP
    example = next(iter(colours.values()), COMMON)
    kinds: list[tuple[Look, str]] = [
        ((example, "", False), "one sequence's own"),
        ((example, "", True), "samples of one request"),
        ((COMMON, "", True), "several requests"),
        ((CACHED, "", False), "cached for a prefix hit"),
        ((HELD, "", False), "given up, step under way"),
        ((FREE, "", False), "free"),
    ]
    named = list(colours.items())
    requests: list[tuple[Look, str]] = [
        ((colour, "", False), f"request {name}") for name, colour in named[:MOST_NAMES]
    ]
    for title, looks in (("A block is", kinds), ("Colours", requests)):
        yield f'<text x="{x}" y="{y + 11}" font-weight="bold">{title}</text>'
        for look, name in looks:
            y += 16
            yield from _rectangles(look, x, y, 12, 12)
            yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="none" stroke="#777"/>'
            yield f'<text x="{x + 18}" y="{y + 11}">{html.escape(name)}</text>'
        y += 24
    if len(named) > MOST_NAMES:
        yield f'<text x="{x}" y="{y}">and {len(named) - MOST_NAMES} more</text>'
