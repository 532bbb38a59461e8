"""Steps in a trace: what is named so of a rank's threads, or graphs, and what lies in one."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable

from penstock._trace_files import Interval, Slice, Trace, TraceError, Track

COMPUTE_STREAM = "compute stream"  # of a GPU: the track of its waits
GRAPH = "graph of a step"  # a lane's slice: from the begin of a captured step on the GPU to its end
MEMORY_FULL = "memory full "  # and a group's name: where its gather would begin, but for that
WAIT_GRADIENTS = "wait gradients"
WAITS_OF_REDUCTIONS = frozenset({WAIT_GRADIENTS, "wait presence"})  # all others are for gathers


def steps_of(tracks: Iterable[Track]) -> list[Slice]:
    """Return the steps of a rank, the earliest first; captured ones as they were on the GPU."""
    lanes: list[Slice] = []
    threads: list[Slice] = []
    for track in tracks:
        (lanes if track.is_lane else threads).extend(track.slices)
    graphs = [one for one in lanes if one.name == GRAPH]
    steps = [one for one in threads if one.name == "step"]
    if graphs:  # a step without a forward of its own has launched one
        forwards = sorted(one.begin for one in threads if one.name == "forward")
        steps = [step for step in steps if _has_any(forwards, step)]
    return sorted([*steps, *graphs], key=lambda step: step.begin)


def _has_any(times: list[float], step: Slice) -> bool:
    first = bisect.bisect_left(times, step.begin)
    return first < len(times) and times[first] < step.end


def find_step(trace: Trace, step: int | None) -> tuple[int, dict[int, Slice]]:
    """Find a step on all ranks.

    Parameters
    ----------
    trace : Trace
        A trace of some ranks, which may have lost different numbers of early steps.
    step : int, optional
        Which one of the lowest rank, from 0, negative from the end; None: the middle one.

    Returns
    -------
    int
        Its number.
    dict
        Each rank's step that shares most time with that one; none of a trace without steps.

    Raises
    ------
    TraceError
        The lowest rank has no such step.
    """
    steps = matched_steps({rank: trace.of_rank(rank) for rank in trace.ranks})
    if step is None and not steps:
        return 0, {}
    number = (len(steps) - 1) // 2 if step is None else step
    try:
        return number % max(len(steps), 1), steps[number]
    except IndexError:
        raise TraceError(f"{trace.path}: no step {step}; it has {len(steps)}") from None


def matched_steps(ranks: dict[int, list[Track]]) -> list[dict[int, Slice]]:
    """Return for each step of the lowest rank what of each rank shares most time with it."""
    found = {rank: steps_of(tracks) for rank, tracks in ranks.items()}
    begins = {rank: [step.begin for step in steps] for rank, steps in found.items()}
    matched = []
    for wanted in next(iter(found.values()), []):
        near = {rank: _near(steps, begins[rank], wanted) for rank, steps in found.items()}
        best = {r: max(n, key=lambda one: _shared(one, wanted)) for r, n in near.items() if n}
        matched.append({r: one for r, one in best.items() if _shared(one, wanted) >= 0})
    return matched


def _near(steps: list[Slice], begins: list[float], wanted: Slice) -> list[Slice]:
    first = max(bisect.bisect(begins, wanted.begin) - 1, 0)
    return steps[first : bisect.bisect(begins, wanted.end)]


def _shared(one: Slice, other: Slice) -> float:
    return min(one.end, other.end) - max(one.begin, other.begin)


def clipped(track: Track, begin: float, end: float) -> Track:
    """Return what a track has between two times."""
    inside = [
        Slice(one.name, max(one.begin, begin), min(one.end, end), one.args)
        for one in track.slices
        if one.end > begin and one.begin < end
    ]
    return Track(track.name, track.order, track.is_lane, inside)


# ---- spans of time ------------------------------------------------------------------------------


def span_of(tracks: Iterable[Track]) -> Interval:
    """Return the first begin and the last end."""
    slices = [s for track in tracks for s in track.slices]
    if not slices:
        return 0.0, 0.0
    return min(s.begin for s in slices), max(s.end for s in slices)


def is_wait(name: str) -> bool:
    """Whether a thread's slice is exposed communication."""
    return name.startswith("wait")


def waits_of(
    tracks: Iterable[Track], are_wanted: Callable[[str], bool] = is_wait
) -> list[Interval]:
    """Return when a thread, or the compute stream of a GPU, stood in a wait; only in some."""
    return union(
        one
        for track in tracks
        if not track.is_lane
        for one in track.slices
        if is_wait(one.name) and are_wanted(one.name)
    )


def union(slices: Iterable[Slice]) -> list[Interval]:
    """Return when at least one of the slices lasted."""
    merged: list[Interval] = []
    for begin, end in sorted((s.begin, s.end) for s in slices):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length_of(intervals: Iterable[Interval]) -> float:
    """Return the sum of lengths."""
    return sum(end - begin for begin, end in intervals)


class Spans:
    """Spans of time, the earliest first, without overlap."""

    def __init__(self, spans: list[Interval]) -> None:
        self._spans = spans
        self._begins = [begin for begin, _ in spans]

    def between(self, begin: float, end: float) -> float:
        """Return how much of them lies between two times."""
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        near = self._spans[first : bisect.bisect_left(self._begins, end)]
        return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in near)


def innermost(slices: Iterable[Slice]) -> list[Slice]:
    """Cut slices of a thread that contain others, so that each moment has the innermost one."""
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
