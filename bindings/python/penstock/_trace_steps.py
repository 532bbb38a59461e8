"""Steps in a trace: the slices named "step" of a rank's threads, and what lies in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock._trace_files import Interval, Slice, Trace, TraceError, Track

WAIT_GRADIENTS = "wait gradients"  # all other waits are for gathers


def steps_of(tracks: Iterable[Track]) -> list[Slice]:
    """Return the steps of a rank, the earliest first."""
    found = [s for track in tracks if not track.is_lane for s in track.slices if s.name == "step"]
    return sorted(found, key=lambda step: step.begin)


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
    ranks = {rank: steps_of(trace.of_rank(rank)) for rank in trace.ranks}
    steps = next(iter(ranks.values()), [])
    if step is None and not steps:
        return 0, {}
    number = (len(steps) - 1) // 2 if step is None else step
    try:
        wanted = steps[number]
    except IndexError:
        raise TraceError(f"{trace.path}: no step {step}; it has {len(steps)}") from None
    found = {
        rank: max(own, key=lambda one: _shared(one, wanted)) for rank, own in ranks.items() if own
    }
    return number % len(steps), found


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


def begun_in(track: Track, begin: float, end: float) -> Track:
    """Return what begins on a track between two times, whole."""
    inside = [one for one in track.slices if begin <= one.begin < end]
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


def shared_by(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Return how much of the intervals lies between two times."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in intervals)
