"""Traces of several ranks, and of torch's profiler, become one file."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock._trace_files import (
    FIRST_OTHER_PID,
    MOST,
    Event,
    PathLike,
    Trace,
    TraceError,
    load,
    write,
)


def merge(paths: Sequence[PathLike], out: PathLike) -> dict[int, float]:
    """Write the traces of several ranks as one file.

    Clocks are aligned twice: by the real time at which each trace began, then by collectives, which
    complete on all ranks together: each rank is moved by the median distance of its completions
    from those of the first file. A file of torch's profiler is moved as its rank is, and its
    processes get numbers of their own: gathers then stand beside the operators that they are for.

    Parameters
    ----------
    paths
        The ranks' files, each rank in one of them, and files of torch's profiler; of a folder all
        files in it whose names end in ``.json`` or ``.json.gz``.
    out
        The file to write; compressed if its name ends in ``.gz``.

    Returns
    -------
    dict
        For each rank that is not in the first file: by how many microseconds its clock was behind
        that file's (negative: ahead of it).

    Raises
    ------
    TraceError
        A file is no trace, none is of Penstock's, or a rank is in two of them.
    OSError
        A file cannot be read or written.
    """
    loaded = [load(path) for path in _files_of(paths, out)]
    traces = [trace for trace in loaded if trace.is_penstocks]
    others = [trace for trace in loaded if not trace.is_penstocks]
    if not traces:
        raise TraceError("nothing to merge: name at least one trace of Penstock's")
    _refuse_repeated_ranks(traces)
    base_ns = traces[0].base_ns
    moved: dict[int, float] = {}
    shifts = []
    for trace in traces + others:
        shift = (trace.base_ns - base_ns) / 1000
        if trace.is_penstocks:
            moved |= dict.fromkeys(trace.ranks, _correction(traces[0], trace, shift))
        rank = _rank_of(trace)
        shift += 0.0 if rank is None else moved.get(rank, 0.0)
        shifts.append(round(shift, 3))  # one rounding for all
    begins = [shift + trace.begin for shift, trace in zip(shifts, traces + others, strict=True)]
    lowest_ns = round(min(begins) * 1000)  # no time before 0
    shifts = [shift - lowest_ns / 1000 for shift in shifts]
    # A file that was merged before has fewer such numbers than that.
    renumbered = _Renumbered(3 * sum(len(trace.events) for trace in traces))
    events = [trace.events for trace in traces] + [renumbered.events(other) for other in others]
    write(out, _merged_fields(traces, base_ns + lowest_ns), _shifted(events, shifts))
    return {rank: by for rank, by in sorted(moved.items()) if rank not in traces[0].ranks}


def _files_of(paths: Iterable[PathLike], out: PathLike) -> Iterator[PathLike]:
    """Look into folders; what an earlier merge has left there is not merged again."""
    for path in paths:
        if not Path(path).is_dir():
            yield path
            continue
        for inner in sorted(Path(path).iterdir()):
            is_result = inner.resolve() == Path(out).resolve()
            if inner.name.endswith((".json", ".json.gz")) and not is_result:
                yield inner


def _rank_of(trace: Trace) -> int | None:
    """Return the only rank, or the one that a profiler says it ran on."""
    if not trace.is_penstocks:
        return trace.fields.get("distributedInfo", {}).get("rank")
    return trace.ranks[0] if trace.ranks else None


def _refuse_repeated_ranks(traces: Iterable[Trace]) -> None:
    seen: dict[int, str] = {}
    for trace in traces:
        for rank in trace.ranks:
            if rank in seen:
                raise TraceError(
                    f"{trace.path}: rank {rank} is in {seen[rank]} already; name each rank once"
                )
            seen[rank] = trace.path


def _completions(trace: Trace) -> dict[tuple[str, int], list[float]]:
    """Collect the ends of the collectives by (name, ticket), in ascending order."""
    ends: dict[tuple[str, int], list[float]] = defaultdict(list)
    for track in trace.tracks.values():
        for one in track.slices:
            if track.is_lane and "ticket" in one.args:
                ends[one.name, one.args["ticket"]].append(one.end)
    for times in ends.values():
        times.sort()
    return ends


def _correction(reference: Trace, trace: Trace, shift: float) -> float:
    """Find what `trace`, moved by `shift`, still has to move to complete with `reference`."""
    theirs = _completions(reference)
    # A replayed ticket completes many times: each completion goes with the nearest.
    distances = [
        _nearest(theirs[key], end + shift) - (end + shift)
        for key, ends in _completions(trace).items()
        if key in theirs
        for end in ends
    ]
    return statistics.median(distances) if distances else 0.0


def _nearest(ascending: list[float], value: float) -> float:
    at = bisect.bisect(ascending, value)
    return min(ascending[max(at - 1, 0) : at + 1], key=lambda other: abs(other - value))


class _Renumbered:
    """Events of profilers with numbers that no rank has: their processes, threads and arrows."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._numbers: dict[Any, int] = {}

    def events(self, trace: Trace) -> list[Event]:
        """Return the events of one file."""
        rank = _rank_of(trace)
        where = "" if rank is None else f" of rank {rank}"
        return [self._event(trace.path, where, event) for event in trace.events]

    def _event(self, path: str, where: str, event: Event) -> Event:
        process = (path, event["pid"])
        own = {"pid": FIRST_OTHER_PID + self._number(process)}
        if "tid" in event:
            # A viewer takes a thread that has its process's number for the main one.
            own["tid"] = 2 * FIRST_OTHER_PID + self._number((process, event["tid"]))
        if "id" in event:
            own["id"] = MOST // 2 + self._number((path, event.get("cat"), "id", event["id"]))
        if event["ph"] == "M" and event["name"] == "process_name":
            return event | own | {"args": {"name": f"{event['args'].get('name', '')}{where}"}}
        return event | own

    def _number(self, what: Any) -> int:
        return self._numbers.setdefault(what, self._first + len(self._numbers))


def _merged_fields(traces: list[Trace], base_ns: int) -> dict[str, Any]:
    counts = [trace.fields["penstock"] for trace in traces]
    fields = dict(traces[0].fields)
    if len(traces) > 1 and "distributedInfo" in fields:  # of all ranks, not of the first one
        info: dict[str, Any] = fields["distributedInfo"]
        fields["distributedInfo"] = {key: info[key] for key in info if key != "rank"}
    fields["baseTimeNanoseconds"] = base_ns
    fields["penstock"] = {
        key: sum(count.get(key, 0) for count in counts) for key in ("records", "overwritten")
    }
    return fields


def _shifted(files: list[list[Event]], shifts: list[float]) -> Iterator[Event]:
    for events, shift in zip(files, shifts, strict=True):
        for event in events:
            yield event | {"ts": round(event["ts"] + shift, 3)} if "ts" in event else event
