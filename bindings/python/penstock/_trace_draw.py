"""Pictures of a step that was traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock._picture_files import write_picture
from penstock._pictures import NARROWEST, WIDTH, Group, Row, picture, time_text
from penstock._trace_files import Interval, PathLike, Slice, Trace, TraceError, Track, load_own
from penstock._trace_kinds import kind_of
from penstock._trace_steps import clipped, find_step, innermost, length_of, span_of, waits_of

_MOST_RANKS = 16
_PHASES = ("forward", "backward", "optimizer")


def draw(path: PathLike, out: PathLike, step: int | None = None, width: int = WIDTH) -> None:
    """Draw a step of a trace: a row a thread and lane, slices over time.

    Threads come first, with their innermost slices, where exposed communication stands out; its
    sum stands above each rank. Of more than 16 ranks three are drawn: the one whose step was the
    fastest, the median, and the slowest.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.
    out
        The file to write: SVG, or PNG where its name ends in ``.png``, for which resvg-py has to be
        installed.
    step
        Which step of the lowest rank to show, from 0, negative from the end; None:
        the one in the middle, or all of a trace without steps.
    width
        Of the picture, in pixels.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step, or the width is below 800.
    PictureError
        There is nothing that makes a PNG.
    OSError
        A file cannot be read or written.
    """
    if width < NARROWEST:
        raise TraceError(f"a picture of {width} pixels has no room for its legend: {NARROWEST} do")
    write_picture([drawn(load_own(path), step, width=width)], out)


def drawn(
    trace: Trace, step: int | None = None, first: Iterable[Group] = (), width: int = WIDTH
) -> str:
    """Return the picture of a step of a trace that was read, below some other groups of rows."""
    number, steps = find_step(trace, step)
    begin, end = _window(trace, list(steps.values()))
    groups = [
        _rank(f"rank {rank}{note}", trace.of_rank(rank), steps.get(rank), (begin, end))
        for rank, note in _chosen(trace, steps).items()
    ]
    what = f"Step {number} of " if steps else ""
    title = f"{what}{Path(trace.path).name}: {time_text(end - begin, end - begin)}"
    return "\n".join(picture(title, [*first, *groups], begin, end, width))


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


def _rank(name: str, tracks: list[Track], step: Slice | None, window: Interval) -> Group:
    begin, end = window if step is None else (step.begin, step.end)
    tracks, duration = [clipped(track, begin, end) for track in tracks], end - begin
    exposed = length_of(waits_of(tracks))
    share = exposed / duration if duration > 0 else 0.0
    result = Group(
        f"{name}: {time_text(duration, duration)}, of which "
        f"{time_text(exposed, duration)} ({share:.1%}) exposed communication"
    )
    for track in sorted(tracks, key=lambda track: track.is_lane):
        result.rows += _rows(track)
    return result


# ---- rows ---------------------------------------------------------------------------------------


def _rows(track: Track) -> Iterator[Row]:
    if track.is_lane:
        for slices in _side_by_side(track.slices):
            yield Row(track.name, [(one, kind_of(one.name, track.name)) for one in slices])
    elif not track.name.startswith("worker "):  # they launch what the lanes show
        phases = [(one, "phase") for one in track.slices if one.name in _PHASES]
        shown = [one for one in innermost(track.slices) if one.name != "step"]
        if phases:
            yield Row("phase", phases)
        if shown:
            label = "compute" if phases else track.name
            yield Row(label, [(one, kind_of(one.name, None)) for one in shown])


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
