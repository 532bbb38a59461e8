"""What a trace tells in figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from penstock._trace_files import Interval, PathLike, Slice, Trace, Track, load_own


def report(path: PathLike) -> dict[str, Any]:
    """Sum up a trace.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.

    Returns
    -------
    dict
        ``ranks``: for each rank ``span_us``; ``exposed_us``, the time in which a thread, or the
        compute stream of a GPU, was in a slice whose name begins with "wait", and
        ``exposed_share`` of the span; ``steps``, the number of slices named "step", and
        ``exposed_step_us``, the median exposed time in one (None without steps); ``lanes``, for
        each lane ``busy_us``, ``busy_share`` of the span, ``count`` and ``bytes`` of its tasks.
        ``longest``: the ten longest slices of lanes. ``overwritten``: records that the rings could
        not keep, or the file.

    Raises
    ------
    TraceError
        The file is no trace.
    OSError
        It cannot be read.
    """
    trace = load_own(path)
    return {
        "ranks": {rank: _report_rank(trace.of_rank(rank)) for rank in trace.ranks},
        "longest": _longest(trace, 10),
        "overwritten": trace.fields["penstock"].get("overwritten", 0),
    }


def _report_rank(tracks: list[Track]) -> dict[str, Any]:
    lanes = [track for track in tracks if track.is_lane]
    threads = [track for track in tracks if not track.is_lane]
    first, last = span(tracks)
    waits = _union(s for track in threads for s in track.slices if s.name.startswith("wait"))
    steps = [s for track in threads for s in track.slices if s.name == "step"]
    exposed = [_covered(waits, step.begin, step.end) for step in steps]
    return {
        "span_us": last - first,
        "exposed_us": _length(waits),
        "exposed_share": _share(_length(waits), last - first),
        "steps": len(steps),
        "exposed_step_us": statistics.median(exposed) if exposed else None,
        "lanes": {lane.name: _report_lane(lane, last - first) for lane in lanes},
    }


def _report_lane(lane: Track, span: float) -> dict[str, Any]:
    busy = _length(_union(lane.slices))
    return {
        "busy_us": busy,
        "busy_share": _share(busy, span),
        "count": len(lane.slices),
        "bytes": sum(s.args.get("bytes", 0) for s in lane.slices),
    }


def _longest(trace: Trace, count: int) -> list[dict[str, Any]]:
    tasks = [
        (one.duration, pid - 1, track.name, one.name)
        for (pid, _), track in trace.tracks.items()
        if track.is_lane
        for one in track.slices
    ]
    keys = ("duration_us", "rank", "lane", "name")
    return [
        dict(zip(keys, task, strict=True)) for task in sorted(tasks, key=lambda t: (-t[0], *t[1:]))
    ][:count]


def span(tracks: Iterable[Track]) -> Interval:
    slices = [s for track in tracks for s in track.slices]
    if not slices:
        return 0.0, 0.0
    return min(s.begin for s in slices), max(s.end for s in slices)


def _union(slices: Iterable[Slice]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted((s.begin, s.end) for s in slices):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _covered(intervals: Iterable[Interval], begin: float, end: float) -> float:
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in intervals)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def printable(text: str) -> str:
    """Replace what would steer a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def format_report(result: dict[str, Any]) -> str:
    """Lay out what :func:`report` returned as a table for people."""
    lines = []
    for rank, row in result["ranks"].items():
        lines.append(
            f"rank {rank}: {row['span_us'] / 1000:.3f} ms, exposed communication "
            f"{row['exposed_us'] / 1000:.3f} ms ({row['exposed_share']:.1%})"
        )
        if row["steps"]:
            lines.append(
                f"  {row['steps']} steps, exposed {row['exposed_step_us'] / 1000:.3f} ms each"
            )
        for name, lane in row["lanes"].items():
            lines.append(
                f"  {printable(name):<24} busy {lane['busy_share']:>6.1%}"
                f" {lane['busy_us'] / 1000:>12.3f} ms"
                f" {lane['count']:>8} tasks {lane['bytes']:>16,} bytes"
            )
    if result["longest"]:
        lines.append("longest tasks:")
    for row in result["longest"]:
        where = printable(f"rank {row['rank']} {row['lane']}")
        name = printable(row["name"])
        lines.append(f"  {row['duration_us'] / 1000:>10.3f} ms  {where:<24} {name}")
    if result["overwritten"]:
        lines.append(f"oldest dropped, {result['overwritten']} records: record for a shorter time")
    return "\n".join(lines)
