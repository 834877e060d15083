"""Small line and bar charts as SVG text: no plotting package is needed to draw a result.

Measured is drawn solid, modelled dashed (bars: hatched); the legend says which is which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 190, 44, 56
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#495057", "#e67700", "#1864ab")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in order of x; `is_modelled` draws it dashed."""

    name: str
    points: Seq[tuple[float, float]]
    is_modelled: bool = False
    colour: int | None = None
    """Index among COLOURS, so that a measured line and its model match; None: the next one."""


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart is of."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    most_y: float | None = None
    """Cuts what lies above: a curve that runs away."""


def line_chart(axes: Axes, series: Seq[Series]) -> str:
    """The chart as an SVG document."""
    points = [point for each in series for point in each.points if _can_draw(axes, point)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    most_y = min(max(ys), axes.most_y) if axes.most_y is not None else max(ys)
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_log=axes.log_x)
    low = min(ys) if axes.log_y else min(0.0, *ys)
    up = _Scale(low, most_y, HEIGHT - BOTTOM, TOP, is_log=axes.log_y)
    parts = [*_frame(axes, across, up)]
    for index, each in enumerate(series):
        colour = index if each.colour is None else each.colour
        parts += _line(axes, each, COLOURS[colour % len(COLOURS)], across, up, index=index)
    is_modelled = {each.is_modelled for each in series}
    parts += _key(len(series), {False: "solid: measured", True: "dashed: modelled"}, is_modelled)
    return _document(parts)


def bar_chart(
    axes: Axes,
    groups: Seq[str],
    bars: Seq[tuple[str, Seq[float]]],
    *,
    modelled: Seq[str] | None = (),
) -> str:
    """Groups of bars; `bars` has one value a group under each name; `modelled` are hatched.

    `modelled`: None for what is neither measured nor modelled, as counts and printed numbers.
    """
    top = max(value for _, values in bars for value in values if math.isfinite(value))
    across = _Scale(0, len(groups), LEFT, WIDTH - RIGHT)
    least = min(v for _, values in bars for v in values if v > 0) if axes.log_y else 0.0
    up = _Scale(least * 0.5 if axes.log_y else 0.0, top, HEIGHT - BOTTOM, TOP, is_log=axes.log_y)
    parts = [*_frame(axes, None, up)]
    step = (WIDTH - RIGHT - LEFT) / len(groups)
    wide = step * 0.8 / len(bars)
    for index, (name, values) in enumerate(bars):
        colour, is_modelled = COLOURS[index % len(COLOURS)], name in (modelled or ())
        for group, value in enumerate(values):
            if not math.isfinite(value) or (axes.log_y and value <= 0):
                continue
            x, y = across(group) + step * 0.1 + wide * index, up(value)
            fill = f"url(#h{index % len(COLOURS)})" if is_modelled else colour
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{fill}" stroke="{colour}"/>'
            )
        parts += _legend(index, name, colour, is_modelled, is_bar=True)
    kinds = set() if modelled is None else {name in modelled for name, _ in bars}
    parts += _key(len(bars), {False: "filled: measured", True: "hatched: modelled"}, kinds)
    for group, label in enumerate(groups):
        for line, part in enumerate(label.split(" on ")):
            y = HEIGHT - BOTTOM + 16 + 14 * line
            parts.append(_text(across(group) + step / 2, y, part, "middle", 11))
    return _document(parts)


class _Scale:
    """From a value to a place."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, is_log: bool = False
    ) -> None:
        high = high if high > low else low + 1
        self.low, self.high, self.start, self.end, self.is_log = low, high, start, end, is_log

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, int(self.high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    base = 2.0 if high / low < 600 else 10.0
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [base**power for power in range(first, last + 1)]


def _can_draw(axes: Axes, point: tuple[float, float]) -> bool:
    x, y = point
    return math.isfinite(y) and (x > 0 or not axes.log_x) and (y > 0 or not axes.log_y)


def _frame(axes: Axes, across: _Scale | None, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [_text(LEFT, 24, axes.title, "start", 15)]
    for tick in up.ticks():
        y = up(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dee2e6"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end", 11))
    for tick in across.ticks() if across else ():
        x = across(tick) if across else 0
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#495057"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}", "middle", 11))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#495057"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 14, axes.x, "middle", 12))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle}" font-size="12" text-anchor="middle" '
        f'transform="rotate(-90 18 {middle})">{escape(axes.y)}</text>'
    )
    return parts


def _line(
    axes: Axes, series: Series, colour: str, across: _Scale, up: _Scale, *, index: int
) -> list[str]:
    shown = [point for point in series.points if _can_draw(axes, point)]
    over = next((i for i, (_, y) in enumerate(shown) if y > up.high), len(shown))
    places = [(across(x), up(y)) for x, y in shown[:over]]
    marks = list(places)
    if 0 < over < len(shown):  # it runs away: drawn up to where it leaves the chart
        (x0, y0), (x1, y1) = shown[over - 1 : over + 1]
        places.append((across(x0 + (x1 - x0) * (up.high - y0) / (y1 - y0)), up(up.high)))
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if series.is_modelled else ""
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in marks]
    return parts + _legend(index, series.name, colour, series.is_modelled, is_bar=False)


def _legend(index: int, name: str, colour: str, is_modelled: bool, *, is_bar: bool) -> list[str]:
    x, y = WIDTH - RIGHT + 12, TOP + 8 + 20 * index
    dash = ' stroke-dasharray="6 4"' if is_modelled else ""
    mark = f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2"{dash}/>'
    if is_bar:
        fill = f"url(#h{index % len(COLOURS)})" if is_modelled else colour
        mark = f'<rect x="{x}" y="{y - 6}" width="22" height="11" fill="{fill}" stroke="{colour}"/>'
    return [mark, _text(x + 28, y + 4, name, "start", 11)]


def _key(below: int, words: dict[bool, str], kinds: set[bool]) -> list[str]:
    """Under the legend: what the strokes mean, of those that the chart has."""
    x, y = WIDTH - RIGHT + 12, TOP + 20 + 20 * below
    lines = [words[kind] for kind in sorted(kinds)]
    return [_text(x, y + 14 * line, text, "start", 11) for line, text in enumerate(lines)]


def _text(x: float, y: float, text: str, anchor: str, size: int) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _document(parts: list[str]) -> str:
    hatches = "".join(
        f'<pattern id="h{i}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V5" stroke="{c}" stroke-width="3"/></pattern>'
        for i, c in enumerate(COLOURS)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" fill="#212529"><defs>{hatches}</defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    )
    return head + "".join(parts) + "</svg>\n"
