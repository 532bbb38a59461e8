"""Pictures of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from penstock._trace_files import Interval, PathLike, Slice, Trace, Track, load_own, printable
from penstock._trace_kinds import COLORS, kind_of, text_color
from penstock._trace_steps import clipped, find_step, length_of, span_of, waits_of

_WIDTH, _LABEL, _MARGIN = 1400.0, 130.0, 30.0
_ROW, _BAR, _LETTER = 20.0, 17.0, 7.0  # heights of a row and a bar; a letter's width
_HEAD = 72.0  # where the first rank begins, below title, legend and axis
_MOST_RANKS = 16
_PHASES = ("forward", "backward", "optimizer")
_NARROW = 0.3  # bars that are narrower are drawn once where they lie side by side


@dataclass
class _Row:
    """Slices that do not overlap, with their kinds."""

    label: str
    bars: list[tuple[Slice, str]]


@dataclass
class _Rank:
    """The rows of a rank, under a line that sums it up."""

    title: str
    rows: list[_Row] = field(default_factory=list)


def draw(path: PathLike, out: PathLike, step: int | None = None) -> None:
    """Draw a step of a trace as an SVG picture: a row a thread and lane, slices over time.

    Threads come first, with their innermost slices, where exposed communication stands out; its
    sum stands above each rank. Of more than 16 ranks three are drawn: the one whose step was the
    fastest, the median, and the slowest.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.
    out
        The file to write.
    step
        Which slice named "step" of the lowest rank to show, from 0, negative from the end; None:
        the one in the middle, or all of a trace without steps.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step.
    OSError
        A file cannot be read or written.
    """
    trace = load_own(path)
    number, steps = find_step(trace, step)
    ranks = _chosen(trace, steps)
    begin, end = _window(trace, [steps[rank] for rank in ranks if rank in steps])
    groups = [
        _rank(f"rank {rank}{note}", trace.of_rank(rank), steps.get(rank), (begin, end))
        for rank, note in ranks.items()
    ]
    what = f"Step {number} of " if steps else ""
    title = f"{what}{Path(path).name}: {_time(end - begin, end - begin)}"
    Path(out).write_text("\n".join(_picture(title, groups, begin, end)), encoding="utf-8")


def _chosen(trace: Trace, steps: dict[int, Slice]) -> dict[int, str]:
    """Return the ranks to draw, with a note of why."""
    if len(trace.ranks) <= _MOST_RANKS:
        return dict.fromkeys(trace.ranks, "")
    spans = {rank: span_of(trace.of_rank(rank)) for rank in trace.ranks}
    spans |= {rank: (step.begin, step.end) for rank, step in steps.items()}
    order = sorted(trace.ranks, key=lambda rank: length_of([spans[rank]]))
    return {
        order[0]: f", the fastest of {len(order)}",
        order[len(order) // 2]: ", the median",
        order[-1]: ", the slowest",
    }


def _window(trace: Trace, steps: list[Slice]) -> Interval:
    if not steps:
        return span_of(trace.tracks.values())
    return min(step.begin for step in steps), max(step.end for step in steps)


def _rank(name: str, tracks: list[Track], step: Slice | None, window: Interval) -> _Rank:
    begin, end = window if step is None else (step.begin, step.end)
    tracks, duration = [clipped(track, begin, end) for track in tracks], end - begin
    exposed = length_of(waits_of(tracks))
    share = exposed / duration if duration > 0 else 0.0
    result = _Rank(
        f"{name}: {_time(duration, duration)}, of which "
        f"{_time(exposed, duration)} ({share:.1%}) exposed communication"
    )
    for track in sorted(tracks, key=lambda track: track.is_lane):
        result.rows += _rows(track)
    return result


# ---- rows ---------------------------------------------------------------------------------------


def _rows(track: Track) -> Iterator[_Row]:
    if track.is_lane:
        for slices in _side_by_side(track.slices):
            yield _Row(track.name, [(one, kind_of(one.name, track.name)) for one in slices])
    elif not track.name.startswith("worker "):  # they launch what the lanes show
        phases = [(one, "phase") for one in track.slices if one.name in _PHASES]
        shown = [one for one in _innermost(track.slices) if one.name != "step"]
        if phases:
            yield _Row("phase", phases)
        if shown:
            label = "compute" if phases else track.name
            yield _Row(label, [(one, kind_of(one.name, None)) for one in shown])


def _innermost(slices: Iterable[Slice]) -> list[Slice]:
    """Cut slices that contain others, so that each moment shows the innermost one."""
    found: list[Slice] = []
    open_slices: list[Slice] = []
    at = 0.0

    def show(until: float) -> None:
        nonlocal at
        if until > at:
            one = open_slices[-1]
            found.append(Slice(one.name, at, until, one.args))
            at = until

    def close(until: float) -> None:
        while open_slices and open_slices[-1].end <= until:
            show(open_slices[-1].end)
            open_slices.pop()

    for one in slices:
        close(one.begin)
        if open_slices:
            show(one.begin)
        at = max(at, one.begin)
        open_slices.append(one)
    close(math.inf)
    return found


def _side_by_side(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Lay slices that overlap in rows of their own."""
    rows: list[list[Slice]] = []
    for one in slices:
        free = next((row for row in rows if row[-1].end <= one.begin), None)
        if free is None:
            rows.append([one])
        else:
            free.append(one)
    return rows


# ---- the picture --------------------------------------------------------------------------------


def _picture(title: str, ranks: list[_Rank], begin: float, end: float) -> Iterator[str]:
    height = _HEAD + sum(_ROW * (len(rank.rows) + 1.5) for rank in ranks)
    scale = (_WIDTH - _LABEL - _MARGIN) / max(end - begin, 0.001)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12">'
    )
    yield f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>'
    yield _text(_MARGIN, 22, title, 'font-size="15" font-weight="bold"')
    yield from _legend({kind for rank in ranks for row in rank.rows for _, kind in row.bars})
    yield from _axis(end - begin, scale, height)
    y = _HEAD
    for rank in ranks:
        yield _text(_MARGIN, y + 14, rank.title, 'font-weight="bold"')
        for row in rank.rows:
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
        yield _text(x, _HEAD - 8, _time(count * distance, span, distance), 'text-anchor="middle"')


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * by for by in (1, 2, 5, 10) if power * by >= value * (1 - 1e-9))


def _time(value: float, largest: float, distance: float | None = None) -> str:
    """Lay out a time in the unit of the largest; as many places as a distance of ticks needs."""
    unit, by = next(
        (unit, by)
        for unit, by in (("s", 1e6), ("ms", 1e3), ("\u00b5s", 1.0))
        if largest >= by or by == 1
    )
    places = 1 if distance is None else max(0, -math.floor(math.log10(distance / by) + 1e-9))
    return f"{value / by:.{places}f} {unit}"


def _bars(row: _Row, y: float, begin: float, scale: float) -> Iterator[str]:
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
