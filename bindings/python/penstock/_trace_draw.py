"""Pictures of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from penstock._trace_files import Interval, PathLike, Slice, Trace, TraceError, Track, load_own
from penstock._trace_report import printable, span

_WIDTH, _LABEL, _ROW, _AXIS = 1400.0, 190.0, 16.0, 26.0
_PALETTE = ("#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#eeca3b", "#9d755d", "#7f8fa6", "#59a5d8")
_WAIT = "#e45756"


def draw(path: PathLike, out: PathLike, step: int | None = None) -> None:
    """Draw a step of a trace as an SVG picture: a row a track, slices over time.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.
    out
        The file to write.
    step
        Which slice named "step" of the lowest rank to show, from 0, negative from the end; None:
        the last, or all of a trace without steps.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step.
    OSError
        A file cannot be read or written.
    """
    trace = load_own(path)
    begin, end = _window(trace, step)
    scale = (_WIDTH - _LABEL) / max(end - begin, 0.001)
    body: list[str] = []
    y = _AXIS
    for rank in trace.ranks:
        for track in trace.of_rank(rank):
            rows = _visible_rows(track, begin, end)
            body += _draw_track(f"rank {rank} {track.name}", rows, y, begin, scale)
            y += _ROW * max(len(rows), 1) + 4
    Path(out).write_text("\n".join(_frame(body, y, end - begin)), encoding="utf-8")


def _window(trace: Trace, step: int | None) -> Interval:
    ranks = trace.ranks
    tracks = trace.of_rank(ranks[0]) if ranks else []
    steps = sorted(
        (s.begin, s.end) for t in tracks if not t.is_lane for s in t.slices if s.name == "step"
    )
    if step is None and not steps:
        return span(trace.tracks.values())
    try:
        return steps[-1 if step is None else step]
    except IndexError:
        raise TraceError(f"{trace.path}: no step {step}; it has {len(steps)}") from None


def _visible_rows(track: Track, begin: float, end: float) -> list[list[Slice]]:
    """Lay slices that share time, nested or overlapping, in rows of their own."""
    rows: list[list[Slice]] = []
    for one in track.slices:
        if one.end <= begin or one.begin >= end:
            continue
        shown = Slice(one.name, max(one.begin, begin), min(one.end, end), one.args)
        free = next((row for row in rows if row[-1].end <= shown.begin), None)
        if free is None:
            rows.append([shown])
        else:
            free.append(shown)
    return rows


def _draw_track(
    label: str, rows: list[list[Slice]], y: float, begin: float, scale: float
) -> Iterator[str]:
    yield f'<text x="4" y="{y + _ROW - 4:.1f}">{_xml(label[:28])}</text>'
    for depth, row in enumerate(rows):
        for one in row:
            yield _bar(one, y + depth * _ROW, begin, scale)


def _bar(one: Slice, y: float, begin: float, scale: float) -> str:
    x, width = _LABEL + (one.begin - begin) * scale, max(one.duration * scale, 0.3)
    details = "".join(f", {key} {value}" for key, value in one.args.items())
    title = f"{one.name}: {one.duration:.3f} \u00b5s{details}"
    text = ""
    if width > 7 * len(one.name) + 4:
        text = f'<text x="{x + 2:.1f}" y="{y + _ROW - 5:.1f}" fill="white">{_xml(one.name)}</text>'
    return (
        f'<g><title>{_xml(title)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{_ROW - 2:.1f}" fill="{_color(one.name)}"/>{text}</g>'
    )


def _color(name: str) -> str:
    """Give names that begin with the same word the same color, on every machine."""
    if name.startswith("wait"):
        return _WAIT
    word = name.partition(" ")[0]
    return _PALETTE[sum(word.encode()) % len(_PALETTE)]


def _xml(text: str) -> str:
    """Escape, without the control characters that XML cannot hold."""
    return escape(printable(text))


def _frame(body: Iterable[str], height: float, span: float) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="sans-serif" font-size="11">'
    )
    yield f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>'
    for tick in range(11):
        x = _LABEL + (_WIDTH - _LABEL) * tick / 10
        anchor = "end" if tick == 10 else "start"
        yield f'<path d="M{x:.1f} 16V{height:.0f}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{span * tick / 1e4:.3f} ms</text>'
    yield from body
    yield "</svg>\n"
