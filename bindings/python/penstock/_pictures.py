"""Rows of slices over time, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from penstock._trace_files import Slice, printable
from penstock._trace_kinds import COLORS, text_color

WIDTH, NARROWEST = 1400, 800  # what stands above the rows needs that
_LABEL, _MARGIN = 130.0, 30.0
_ROW, _BAR, _LETTER = 20.0, 17.0, 7.0  # heights of a row and a bar; a letter's width
_HEAD = 72.0  # where the first rank begins, below title, legend and axis
_NARROW = 0.3  # bars that are narrower are drawn once where they lie side by side


@dataclass
class Row:
    """Slices that do not overlap, with their kinds."""

    label: str
    bars: list[tuple[Slice, str]]


@dataclass
class Group:
    """Rows under a line that sums them up: those of a rank."""

    title: str
    rows: list[Row] = field(default_factory=list)


def picture(
    title: str, groups: list[Group], begin: float, end: float, width: int = WIDTH
) -> Iterator[str]:
    """Yield the lines of a picture of what lies between two times, in microseconds."""
    height = _HEAD + sum(_ROW * (len(group.rows) + 1.5) for group in groups)
    scale = (width - _LABEL - _MARGIN) / max(end - begin, 0.001)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12">'
    )
    yield f'<rect width="{width}" height="{height:.0f}" fill="white"/>'
    yield _text(_MARGIN, 22, title, 'font-size="15" font-weight="bold"')
    yield from _legend({kind for group in groups for row in group.rows for _, kind in row.bars})
    yield from _axis(end - begin, scale, height)
    y = _HEAD
    for group in groups:
        yield _text(_MARGIN, y + 14, group.title, 'font-weight="bold"')
        for row in group.rows:
            y += _ROW
            yield _text(_LABEL - 8, y + 13, row.label[:18], 'text-anchor="end"')
            yield from _bars(row, y, begin, scale)
        y += 1.5 * _ROW
    yield "</svg>\n"


def _legend(kinds: set[str]) -> Iterator[str]:
    names = {"exposed": "exposed communication", "update": "optimizer"}
    x = _MARGIN
    for kind in [kind for kind in COLORS if kind in kinds and kind != "phase"]:
        yield f'<rect x="{x:.1f}" y="32" width="12" height="12" fill="{COLORS[kind]}"/>'
        yield _text(x + 17, 42, names.get(kind, kind))
        x += 40 + _LETTER * len(names.get(kind, kind))


def _axis(span: float, scale: float, height: float) -> Iterator[str]:
    """Draw a line and a label at each multiple of 1, 2 or 5 times a power of ten."""
    distance = _round_up(90 / scale)
    for count in range(int(span / distance + 1e-9) + 1):
        x = _LABEL + count * distance * scale
        yield f'<path d="M{x:.1f} {_HEAD - 4:.0f}V{height:.0f}" stroke="#dddddd"/>'
        yield _text(
            x, _HEAD - 8, time_text(count * distance, span, distance), 'text-anchor="middle"'
        )


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * by for by in (1, 2, 5, 10) if power * by >= value * (1 - 1e-9))


def time_text(value: float, largest: float, distance: float | None = None) -> str:
    """Lay out microseconds in the unit of the largest; in as many places as ticks need."""
    unit, by = next(
        (unit, by)
        for unit, by in (("s", 1e6), ("ms", 1e3), ("\u00b5s", 1.0))
        if largest >= by or by == 1
    )
    places = 1 if distance is None else max(0, -math.floor(math.log10(distance / by) + 1e-9))
    return f"{value / by:.{places}f} {unit}"


def _bars(row: Row, y: float, begin: float, scale: float) -> Iterator[str]:
    drawn = -1.0
    for one, kind in row.bars:
        x, width = _LABEL + (one.begin - begin) * scale, one.duration * scale
        if width < _NARROW and x + width < drawn + _NARROW:
            continue
        drawn = x + max(width, _NARROW)
        yield _bar(one, kind, x, y, max(width, _NARROW))


def _bar(one: Slice, kind: str, x: float, y: float, width: float) -> str:
    details = "".join(f", {key} {value}" for key, value in one.args.items())
    color = COLORS[kind]
    names = (one.name, one.name.partition(" ")[2] or one.name)  # the color has told the first word
    name = next((name for name in names if _LETTER * len(name) + 6 < width), None)
    text = "" if name is None else _text(x + 3, y + 13, name, f'fill="{text_color(color)}"')
    title = f"{one.name}: {one.duration:.3f} \u00b5s{details}"
    return (
        f"<g><title>{_xml(title)}</title>"
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_BAR:.1f}" fill="{color}" '
        f'stroke="white" stroke-width="{min(0.5, width / 4):.2f}"/>{text}</g>'
    )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_xml(text)}</text>'


def _xml(text: str) -> str:
    """Escape, without the control characters that XML cannot hold."""
    return escape(printable(text))
