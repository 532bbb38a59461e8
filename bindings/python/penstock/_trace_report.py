"""What a trace tells in figures."""

from __future__ import annotations

import statistics
from typing import Any

from penstock._trace_arrivals import arrivals_of
from penstock._trace_critical import critical_path, mean_path, summed
from penstock._trace_exposed import exposed_by_cause
from penstock._trace_files import PathLike, Slice, Trace, Track, load_own
from penstock._trace_hints import hints_of
from penstock._trace_links import Rank, linked
from penstock._trace_steps import (
    GRAPH,
    WAITS_OF_REDUCTIONS,
    Spans,
    clipped,
    find_step,
    length_of,
    matched_steps,
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
        ``world_size``: of the job, of which the trace may have one rank alone. ``ranks``: for each
        of those that it has ``span_us``; ``exposed_us``, the time in which a thread, or the
        compute stream of a GPU, was in a slice whose name begins with "wait", and
        ``exposed_share`` of the span; ``steps``, how many it has, ``step_us`` and
        ``exposed_step_us``, the median of their lengths and of the exposed time in them (None
        without steps); ``graphs``, how many of them were CUDA graphs, whose times are the GPU's;
        ``exposed_gather_us`` and ``exposed_reduce_us``, by what was waited for; ``lanes``,
        for each lane ``busy_us``, ``busy_share`` of the span, ``count`` and ``bytes`` of its tasks
        but such graphs.

        ``steps``: for each step its number ``step``; ``ranks``, for each rank ``us`` and
        ``exposed_us``; ``critical_path``, from the first rank's begin to the last one's end:
        ``length_us``, ``ranks`` (what is spent on each) and ``parts``, the longest first, with
        ``kind`` ("compute", "moving", "launching", "waking" or "unknown wait"), ``rank``,
        ``lane``, ``name`` and ``us``. ``critical_path``: their average.

        ``exposed``, of a rank on average: ``groups``, the longest first, for each ``group`` that
        was waited for its ``kind`` ("gather" or "reduce"), ``us`` and ``causes`` ("memory_full",
        "late_launch", "lane_busy", "late_rank", "moving", "reduction_tail", "optimizer", "waking",
        "unknown");
        ``late``, for each rank how long it was waited for because it came last.

        ``arrivals``: of a merged trace ``lanes``, for each lane the ``count`` of collectives and,
        of a rank on average, ``waiting_us`` for the last rank and ``moving_us`` from then on;
        ``last``, for each rank the ``count`` of those to which it came last and ``behind_us``, the
        median of how long after the rank before it.

        ``longest``: the ten longest of these tasks. ``overwritten``: records that the rings could
        not keep, or the file. ``hints``: which steps took unusually
        long and why, and which option may help, as sentences.

    Raises
    ------
    TraceError
        The file is no trace, or has no such step.
    OSError
        It cannot be read.
    """
    return report_of(load_own(path), step)


def report_of(trace: Trace, step: int | None = None) -> dict[str, Any]:
    """Sum up a trace that was read, as :func:`report` does."""
    tracks = {rank: trace.of_rank(rank) for rank in trace.ranks}
    ranks = linked(tracks)
    steps, spans = list(enumerate(matched_steps(tracks))), None
    if step is not None:
        steps = [find_step(trace, step)]
        spans = {rank: (one.begin, one.end) for rank, one in steps[0][1].items()}
        tracks = {r: [clipped(t, *spans[r]) for t in tracks[r]] for r in spans}
    told = [_report_step(number, ranks, found) for number, found in steps]
    result = {
        "world_size": trace.fields.get("distributedInfo", {}).get("world_size", len(ranks)),
        "ranks": {rank: _report_rank(own) for rank, own in tracks.items()},
        "steps": told,
        "critical_path": mean_path(told),
        "exposed": exposed_by_cause(ranks, spans),
        "arrivals": arrivals_of(ranks, spans),
        "longest": _longest(tracks, 10),
        "overwritten": trace.fields["penstock"].get("overwritten", 0),
    }
    return result | {"hints": hints_of(result)}


def _report_step(number: int, ranks: dict[int, Rank], steps: dict[int, Slice]) -> dict[str, Any]:
    path = summed(critical_path(ranks, steps), ranks)
    own = {
        rank: {"us": one.duration, "exposed_us": ranks[rank].waited_between(one.begin, one.end)}
        for rank, one in steps.items()
    }
    return {"step": number, "ranks": own, "critical_path": path}


def _report_rank(tracks: list[Track]) -> dict[str, Any]:
    lanes = [track for track in tracks if track.is_lane]
    span = length_of([span_of(tracks)])
    waits = waits_of(tracks)
    steps = steps_of(tracks)
    waiting = Spans(waits)
    exposed = [waiting.between(step.begin, step.end) for step in steps]
    return {
        "span_us": span,
        "exposed_us": length_of(waits),
        "exposed_share": _share(length_of(waits), span),
        "exposed_gather_us": length_of(waits_of(tracks, lambda name: not _is_reduction(name))),
        "exposed_reduce_us": length_of(waits_of(tracks, _is_reduction)),
        "steps": len(steps),
        "step_us": statistics.median(step.duration for step in steps) if steps else None,
        "exposed_step_us": statistics.median(exposed) if exposed else None,
        "graphs": sum(step.name == GRAPH for step in steps),
        "lanes": {lane.name: _report_lane(lane, span) for lane in lanes},
    }


def _is_reduction(wait: str) -> bool:
    return wait in WAITS_OF_REDUCTIONS


def _report_lane(lane: Track, span: float) -> dict[str, Any]:
    tasks = [one for one in lane.slices if one.name != GRAPH]
    busy = length_of(union(tasks))
    return {
        "busy_us": busy,
        "busy_share": _share(busy, span),
        "count": len(tasks),
        "bytes": sum(s.args.get("bytes", 0) for s in tasks),
    }


def _longest(ranks: dict[int, list[Track]], count: int) -> list[dict[str, Any]]:
    tasks = [
        (one.duration, rank, track.name, one.name)
        for rank, tracks in ranks.items()
        for track in tracks
        if track.is_lane
        for one in track.slices
        if one.name != GRAPH
    ]
    keys = ("duration_us", "rank", "lane", "name")
    return [
        dict(zip(keys, task, strict=True)) for task in sorted(tasks, key=lambda t: (-t[0], *t[1:]))
    ][:count]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
