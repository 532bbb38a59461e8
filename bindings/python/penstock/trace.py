"""Merge, report and draw traces: ``python -m penstock.trace merge|report|draw``.

Works on the Chrome trace JSON that Penstock writes, with the standard library alone; the package's
compiled extension is not needed. ``penstock.trace(path)``, which records, is another thing of the
same name: once this module is imported it stands in its place and calls it.
"""

from __future__ import annotations

import argparse
import bisect
import importlib
import json
import math
import statistics
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]
PathLike = str | Path


class TraceError(ValueError):
    """A trace that cannot be used; the text names the file and says what to do."""


@dataclass
class Slice:
    """A span of time on a track; times are microseconds."""

    name: str
    begin: float
    end: float
    args: dict[str, Any]

    @property
    def duration(self) -> float:
        """Length in microseconds."""
        return self.end - self.begin


@dataclass
class Track:
    """A lane ("task" slices) or a thread ("host" slices) of a rank."""

    name: str = ""
    order: float = 0
    is_lane: bool = False
    slices: list[Slice] = field(default_factory=list)


@dataclass
class Trace:
    """One file: its top-level fields, its events, and its tracks by (pid, tid)."""

    path: str
    fields: dict[str, Any]
    events: list[Event]
    tracks: dict[tuple[int, int], Track]

    @property
    def is_penstocks(self) -> bool:
        """Whether Penstock or :func:`merge` wrote it; else a profiler did, such as torch's."""
        return "penstock" in self.fields

    @property
    def ranks(self) -> list[int]:
        """Ranks in the file, in ascending order."""
        pids = {pid for pid, _ in self.tracks} | {event["pid"] for event in self.events}
        return sorted(pid - 1 for pid in pids if pid < _FIRST_OTHER_PID)

    @property
    def base_ns(self) -> int:
        """CLOCK_REALTIME of ts 0."""
        return int(self.fields.get("baseTimeNanoseconds", 0))

    @property
    def begin(self) -> float:
        """The earliest time that has to be shown, in microseconds."""
        if self.is_penstocks:
            return 0.0
        return min((event["ts"] for event in self.events if "ts" in event), default=0.0)

    def of_rank(self, rank: int) -> list[Track]:
        """Tracks of a rank from top to bottom."""
        own = [track for (pid, _), track in self.tracks.items() if pid == rank + 1]
        return sorted(own, key=lambda track: (track.order, track.name))


# ---- reading ----------------------------------------------------------------------------------


def load(path: PathLike) -> Trace:
    """Read a trace file.

    Parameters
    ----------
    path
        Chrome trace JSON as Penstock, :func:`merge` or torch's profiler writes it.

    Returns
    -------
    Trace
        Its events, all of which are well-formed, and its tracks (of a profiler's file: none).

    Raises
    ------
    TraceError
        The file is no JSON, or no trace.
    OSError
        It cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a trace ({error}); was it written to its end?") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError(f"{path}: not a trace (no list traceEvents); give a file Penstock wrote")
    trace = Trace(str(path), content, content.pop("traceEvents"), {})
    _check(trace)
    trace.tracks = _tracks(trace.events) if trace.is_penstocks else {}
    return trace


def _load_own(path: PathLike) -> Trace:
    trace = load(path)
    if not trace.is_penstocks:
        raise TraceError(f"{path}: a profiler wrote it: merge it with traces of Penstock's")
    return trace


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is no number that JSON has")


_MOST = 2**53  # of any number here: whole numbers are exact in floats up to there
_FIRST_OTHER_PID = 2**20  # in merged files: processes that are no ranks

Test = Callable[[Any], bool]
Fields = dict[str, Test]


def _of(*types: type) -> Test:
    return lambda value: type(value) in types


def _from(lowest: int, *types: type, most: int = _MOST) -> Test:
    return lambda value: type(value) in types and lowest <= value <= most


_is_text, _is_object, _is_label, _is_count = _of(str), _of(dict), _of(str, int), _from(0, int)

_HEAD: Fields = {
    "baseTimeNanoseconds": _from(0, int, most=2**63),
    "distributedInfo": _is_object,
    "penstock": _is_object,
}
_INFO: Fields = {"rank": _is_count, "records": _is_count, "overwritten": _is_count}
_EVENT: Fields = {
    "ph": _is_text,
    "name": _is_text,
    "cat": _is_text,
    "pid": _from(1, int),
    "tid": _is_count,
    "ts": _from(-_MOST, int, float),
    "dur": _from(0, int, float),
    "id": _is_label,
    "args": _is_object,
}
_EVENT_OF_OTHERS = _EVENT | {"pid": _is_label, "tid": _is_label}
_ARGS: Fields = {"ticket": _is_count, "bytes": _is_count}
_NAMES: Fields = {"name": _is_text, "sort_index": _from(-_MOST, int, float)}
_ALL = frozenset({"ph", "name", "pid"})
_NEEDED = {  # by phase
    "X": _ALL | {"ts", "dur"},
    "M": _ALL | {"args"},
    "C": _ALL | {"ts"},
    **dict.fromkeys("besf", _ALL | {"ts", "id"}),
}


def _check(trace: Trace) -> None:
    """Raise unless all fields that are read hold what they should, so that nobody else looks."""
    _check_fields(trace, "", trace.fields, _HEAD)
    for name in ("distributedInfo", "penstock"):
        _check_fields(trace, name, trace.fields.get(name, {}), _INFO)
    known = _EVENT if trace.is_penstocks else _EVENT_OF_OTHERS
    for number, event in enumerate(trace.events):
        if type(event) is not dict:
            raise TraceError(f"{trace.path}: traceEvents {number} is no object")
        _check_fields(trace, number, event, known)
        phase = event.get("ph", "")
        _check_fields(trace, number, event.get("args", {}), _NAMES if phase == "M" else _ARGS)
        for name in sorted(_NEEDED.get(phase, _ALL) - event.keys()):
            raise TraceError(f"{trace.path}: traceEvents {number} has no field {name!r}")


def _check_fields(trace: Trace, where: str | int, found: dict[str, Any], known: Fields) -> None:
    for name, value in found.items():
        test = known.get(name)
        if test is not None and not test(value):
            place = f"traceEvents {where}" if type(where) is int else where or "the head"
            raise TraceError(f"{trace.path}: {place} has {value!r:.40} as {name!r}")


def _tracks(events: Iterable[Event]) -> dict[tuple[int, int], Track]:
    tracks: dict[tuple[int, int], Track] = defaultdict(Track)
    open_pairs: dict[tuple[int, Any], Event] = {}
    for event in events:
        key, phase = (event["pid"], event.get("tid", 0)), event["ph"]
        if key[0] >= _FIRST_OTHER_PID:
            continue
        if phase == "X":
            _add_slice(tracks[key], event, event["ts"] + event["dur"])
        elif phase == "b":
            open_pairs[key[0], event["id"]] = event
        elif phase == "e" and (key[0], event["id"]) in open_pairs:
            _add_slice(tracks[key], open_pairs.pop((key[0], event["id"])), event["ts"])
        elif phase == "M" and event["name"] == "thread_name":
            tracks[key].name = event["args"].get("name", "")
        elif phase == "M" and event["name"] == "thread_sort_index":
            tracks[key].order = event["args"].get("sort_index", 0)
    for track in tracks.values():
        track.slices.sort(key=lambda s: (s.begin, -s.end))
    return dict(tracks)


def _add_slice(track: Track, event: Event, end: float) -> None:
    track.is_lane = track.is_lane or event.get("cat") == "task"
    track.slices.append(Slice(event["name"], event["ts"], end, event.get("args", {})))


# ---- merging ----------------------------------------------------------------------------------


def merge(paths: Sequence[PathLike], out: PathLike) -> None:
    """Write the traces of several ranks as one file.

    Clocks are aligned twice: by the real time at which each trace began, then by collectives, which
    complete on all ranks together: each rank is moved by the median distance of its completions
    from those of the first file. A file of torch's profiler is moved as its rank is, and its
    processes get numbers of their own: gathers then stand beside the operators that they are for.

    Parameters
    ----------
    paths
        The ranks' files, each rank in one of them, and files of torch's profiler.
    out
        The file to write.

    Raises
    ------
    TraceError
        A file is no trace, none is of Penstock's, or a rank is in two of them.
    OSError
        A file cannot be read or written.
    """
    loaded = [load(path) for path in paths]
    traces = [trace for trace in loaded if trace.is_penstocks]
    others = [trace for trace in loaded if not trace.is_penstocks]
    if not traces:
        raise TraceError("nothing to merge: name at least one trace of Penstock's")
    _refuse_repeated_ranks(traces)
    base_ns = traces[0].base_ns
    moved: dict[int | None, float] = {}
    shifts = []
    for trace in traces + others:
        shift = (trace.base_ns - base_ns) / 1000
        if trace.is_penstocks:
            moved |= dict.fromkeys(trace.ranks, _correction(traces[0], trace, shift))
        shifts.append(round(shift + moved.get(_rank_of(trace), 0.0), 3))  # one rounding for all
    begins = [shift + trace.begin for shift, trace in zip(shifts, traces + others, strict=True)]
    lowest_ns = round(min(begins) * 1000)  # no time before 0
    shifts = [shift - lowest_ns / 1000 for shift in shifts]
    # A file that was merged before has fewer such numbers than that.
    renumbered = _Renumbered(3 * sum(len(trace.events) for trace in traces))
    events = [trace.events for trace in traces] + [renumbered.events(other) for other in others]
    _write(out, _merged_fields(traces, base_ns + lowest_ns), _shifted(events, shifts))


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
        own = {"pid": _FIRST_OTHER_PID + self._number(process)}
        if "tid" in event:
            own["tid"] = 1 + self._number((process, event["tid"]))
        if "id" in event:
            own["id"] = _MOST // 2 + self._number((path, event.get("cat"), "id", event["id"]))
        if event["ph"] == "M" and event["name"] == "process_name":
            return event | own | {"args": {"name": f"{event['args'].get('name', '')}{where}"}}
        return event | own

    def _number(self, what: Any) -> int:
        return self._numbers.setdefault(what, self._first + len(self._numbers))


def _merged_fields(traces: list[Trace], base_ns: int) -> dict[str, Any]:
    counts = [trace.fields["penstock"] for trace in traces]
    fields = dict(traces[0].fields)
    fields["baseTimeNanoseconds"] = base_ns
    fields["penstock"] = {
        key: sum(count.get(key, 0) for count in counts) for key in ("records", "overwritten")
    }
    return fields


def _shifted(files: list[list[Event]], shifts: list[float]) -> Iterator[Event]:
    for events, shift in zip(files, shifts, strict=True):
        for event in events:
            yield event | {"ts": round(event["ts"] + shift, 3)} if "ts" in event else event


def _write(out: PathLike, fields: dict[str, Any], events: Iterable[Event]) -> None:
    with Path(out).open("w", encoding="utf-8") as file:
        head = json.dumps(fields)
        file.write(head[:-1] + (",\n" if fields else "") + '"traceEvents":[')
        separator = "\n"
        for event in events:
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


# ---- reporting --------------------------------------------------------------------------------


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
        not keep.

    Raises
    ------
    TraceError
        The file is no trace.
    OSError
        It cannot be read.
    """
    trace = _load_own(path)
    return {
        "ranks": {rank: _report_rank(trace.of_rank(rank)) for rank in trace.ranks},
        "longest": _longest(trace, 10),
        "overwritten": trace.fields["penstock"].get("overwritten", 0),
    }


def _report_rank(tracks: list[Track]) -> dict[str, Any]:
    lanes = [track for track in tracks if track.is_lane]
    threads = [track for track in tracks if not track.is_lane]
    first, last = _span(tracks)
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


def _span(tracks: Iterable[Track]) -> Interval:
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


def _printable(text: str) -> str:
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
                f"  {_printable(name):<24} busy {lane['busy_share']:>6.1%}"
                f" {lane['busy_us'] / 1000:>12.3f} ms"
                f" {lane['count']:>8} tasks {lane['bytes']:>16,} bytes"
            )
    if result["longest"]:
        lines.append("longest tasks:")
    for row in result["longest"]:
        where = _printable(f"rank {row['rank']} {row['lane']}")
        name = _printable(row["name"])
        lines.append(f"  {row['duration_us'] / 1000:>10.3f} ms  {where:<24} {name}")
    if result["overwritten"]:
        lines.append(f"{result['overwritten']} records were overwritten: record for a shorter time")
    return "\n".join(lines)


# ---- drawing ----------------------------------------------------------------------------------

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
    trace = _load_own(path)
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
        return _span(trace.tracks.values())
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
    return escape(_printable(text))


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


# ---- the command line -------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("merge", help="put the traces of several ranks into one file")
    one.add_argument("out")
    one.add_argument("traces", nargs="+")
    one = commands.add_parser("report", help="exposed communication, busy lanes, longest tasks")
    one.add_argument("trace")
    one.add_argument("--json", action="store_true", help="as JSON")
    one = commands.add_parser("draw", help="an SVG picture of a step")
    one.add_argument("trace")
    one.add_argument("out")
    one.add_argument("--step", type=int, help="which step, from 0 (default: the last)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "merge":
            merge(options.traces, options.out)
        elif options.command == "draw":
            draw(options.trace, options.out, options.step)
        else:
            result = report(options.trace)
            print(json.dumps(result, indent=2) if options.json else format_report(result))
    except (TraceError, OSError) as error:
        print(f"penstock.trace: {error}", file=sys.stderr)
        return 2
    return 0


class _CallableModule(types.ModuleType):
    """Keeps ``penstock.trace(path)`` working after ``import penstock.trace``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("penstock._tracing").trace(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
else:
    sys.modules[__name__].__class__ = _CallableModule
