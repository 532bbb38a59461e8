"""What a trace tells in figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from penstock._trace_arrivals import arrivals_of
from penstock._trace_files import PathLike, Track, load_own, printable
from penstock._trace_hints import hints_of
from penstock._trace_steps import (
    WAIT_GRADIENTS,
    begun_in,
    clipped,
    find_step,
    length_of,
    shared_by,
    span_of,
    steps_of,
    union,
    waits_of,
)


def report(path: PathLike, step: int | None = None) -> dict[str, Any]:
    """Sum up a trace.

    Parameters
    ----------
    path
        A trace of one rank or a merged one.
    step
        The only step to sum up, as of :func:`draw`; None: the whole trace.

    Returns
    -------
    dict
        ``ranks``: for each rank ``span_us``; ``exposed_us``, the time in which a thread, or the
        compute stream of a GPU, was in a slice whose name begins with "wait", and
        ``exposed_share`` of the span; ``steps``, the number of slices named "step", ``step_us`` and
        ``exposed_step_us``, the median of their lengths and of the exposed time in them (None
        without steps); ``exposed_gather_us`` and ``exposed_reduce_us``, by what was waited for;
        ``lanes``, for each lane ``busy_us``, ``busy_share`` of the span, ``count`` and ``bytes`` of
        its tasks. ``arrivals``: of a merged trace ``lanes``, for each lane the ``count`` of
        collectives and, of a rank on average, ``waiting_us`` for the last rank and ``moving_us``
        from then on; ``last``, for each rank the ``count`` of those to which it came last and
        ``behind_us``, the median of how long after the rank before it. ``longest``: the ten longest
        slices of lanes. ``overwritten``: records that the rings could not keep, or the file.
        ``hints``: which option may help, as sentences.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step.
    OSError
        It cannot be read.
    """
    trace = load_own(path)
    tracks = {rank: trace.of_rank(rank) for rank in trace.ranks}
    begun = tracks
    if step is not None:
        _, steps = find_step(trace, step)
        begun = {r: [begun_in(t, s.begin, s.end) for t in tracks[r]] for r, s in steps.items()}
        tracks = {r: [clipped(t, s.begin, s.end) for t in tracks[r]] for r, s in steps.items()}
    result = {
        "ranks": {rank: _report_rank(own) for rank, own in tracks.items()},
        "arrivals": arrivals_of(begun),
        "longest": _longest(tracks, 10),
        "overwritten": trace.fields["penstock"].get("overwritten", 0),
    }
    return result | {"hints": hints_of(result)}


def _report_rank(tracks: list[Track]) -> dict[str, Any]:
    lanes = [track for track in tracks if track.is_lane]
    span = length_of([span_of(tracks)])
    waits = waits_of(tracks)
    steps = steps_of(tracks)
    exposed = [shared_by(waits, step.begin, step.end) for step in steps]
    return {
        "span_us": span,
        "exposed_us": length_of(waits),
        "exposed_share": _share(length_of(waits), span),
        "exposed_gather_us": length_of(waits_of(tracks, lambda name: name != WAIT_GRADIENTS)),
        "exposed_reduce_us": length_of(waits_of(tracks, lambda name: name == WAIT_GRADIENTS)),
        "steps": len(steps),
        "step_us": statistics.median(step.duration for step in steps) if steps else None,
        "exposed_step_us": statistics.median(exposed) if exposed else None,
        "lanes": {lane.name: _report_lane(lane, span) for lane in lanes},
    }


def _report_lane(lane: Track, span: float) -> dict[str, Any]:
    busy = length_of(union(lane.slices))
    return {
        "busy_us": busy,
        "busy_share": _share(busy, span),
        "count": len(lane.slices),
        "bytes": sum(s.args.get("bytes", 0) for s in lane.slices),
    }


def _longest(ranks: dict[int, list[Track]], count: int) -> list[dict[str, Any]]:
    tasks = [
        (one.duration, rank, track.name, one.name)
        for rank, tracks in ranks.items()
        for track in tracks
        if track.is_lane
        for one in track.slices
    ]
    keys = ("duration_us", "rank", "lane", "name")
    return [
        dict(zip(keys, task, strict=True)) for task in sorted(tasks, key=lambda t: (-t[0], *t[1:]))
    ][:count]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# ---- for people ---------------------------------------------------------------------------------


def format_report(result: dict[str, Any]) -> str:
    """Lay out what :func:`report` returned as a table for people."""
    lines: list[str] = []
    for rank, row in result["ranks"].items():
        lines += _rank_lines(rank, row)
    lines += _arrival_lines(result["arrivals"])
    if result["longest"]:
        lines.append("longest tasks:")
    for row in result["longest"]:
        where = printable(f"rank {row['rank']} {row['lane']}")
        name = printable(row["name"])
        lines.append(f"  {_ms(row['duration_us']):>13}  {where:<24} {name}")
    if result["overwritten"]:
        lines.append(f"oldest dropped, {result['overwritten']} records: record for a shorter time")
    lines += [f"hint: {hint}" for hint in result["hints"]]
    return "\n".join(lines)


def _rank_lines(rank: int, row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"rank {rank}: {_ms(row['span_us'])}, exposed communication "
        f"{_ms(row['exposed_us'])} ({row['exposed_share']:.1%})"
    )
    if row["steps"]:
        yield (
            f"  {row['steps']} steps, each {_ms(row['step_us'])} (median), exposed "
            f"{_ms(row['exposed_step_us'])}"
        )
    for name, lane in row["lanes"].items():
        yield (
            f"  {printable(name):<24} busy {lane['busy_share']:>6.1%} {_ms(lane['busy_us']):>15}"
            f" {lane['count']:>8} tasks {lane['bytes']:>16,} bytes"
        )


def _arrival_lines(arrivals: dict[str, Any]) -> Iterator[str]:
    if arrivals["lanes"]:
        yield "collectives, of a rank on average:"
    for name, lane in arrivals["lanes"].items():
        yield (
            f"  {printable(name):<24} {lane['count']:>8}: waiting for the last rank "
            f"{_ms(lane['waiting_us'])}, moving {_ms(lane['moving_us'])}"
        )
    total = sum(lane["count"] for lane in arrivals["lanes"].values())
    for rank, last in arrivals["last"].items():
        if last["count"]:
            yield (
                f"  rank {rank} came last to {last['count']} of {total}, "
                f"{_ms(last['behind_us'])} (median) behind the one before it"
            )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"
