"""Files of traces: Chrome trace JSON, read, checked and written."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
        return sorted(pid - 1 for pid in pids if pid < FIRST_OTHER_PID)

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
        Chrome trace JSON as Penstock, :func:`merge` or torch's profiler writes it; also
        compressed by gzip.

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
        text = _read(path).decode()
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: not a trace ({error}); was it written to its end?") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError(f"{path}: not a trace (no list traceEvents); give a file Penstock wrote")
    trace = Trace(str(path), content, content.pop("traceEvents"), {})
    _check(trace)
    trace.tracks = _tracks(trace.events) if trace.is_penstocks else {}
    return trace


def _read(path: PathLike) -> bytes:
    content = Path(path).read_bytes()
    return gzip.decompress(content) if content.startswith(_GZIP) else content


def load_own(path: PathLike) -> Trace:
    trace = load(path)
    if not trace.is_penstocks:
        raise TraceError(f"{path}: a profiler wrote it: merge it with traces of Penstock's")
    return trace


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is no number that JSON has")


_GZIP = b"\x1f\x8b"
MOST = 2**53  # of any number here: whole numbers are exact in floats up to there
FIRST_OTHER_PID = 2**20  # in merged files: processes that are no ranks

Test = Callable[[Any], bool]
Fields = dict[str, Test]


def _of(*types: type) -> Test:
    return lambda value: type(value) in types


def _from(lowest: int, *types: type, most: int = MOST) -> Test:
    return lambda value: type(value) in types and lowest <= value <= most


_is_text, _is_object, _is_label, _is_count = _of(str), _of(dict), _of(str, int), _from(0, int)

_HEAD: Fields = {
    "baseTimeNanoseconds": _from(0, int, most=2**63),
    "distributedInfo": _is_object,
    "penstock": _is_object,
}
_INFO: Fields = {
    "rank": _is_count,
    "world_size": _from(1, int),
    "records": _is_count,
    "overwritten": _is_count,
}
_EVENT: Fields = {
    "ph": _is_text,
    "name": _is_text,
    "cat": _is_text,
    "pid": _from(1, int),
    "tid": _is_count,
    "ts": _from(-MOST, int, float),
    "dur": _from(0, int, float),
    "id": _is_label,
    "args": _is_object,
}
_EVENT_OF_OTHERS = _EVENT | {"pid": _is_label, "tid": _is_label}
_ARGS: Fields = {"ticket": _is_count, "bytes": _is_count}
_NAMES: Fields = {"name": _is_text, "sort_index": _from(-MOST, int, float)}
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
        if key[0] >= FIRST_OTHER_PID:
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


def printable(text: str) -> str:
    """Replace what would steer a terminal, or what XML cannot hold."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


# ---- writing ----------------------------------------------------------------------------------


def write(out: PathLike, fields: dict[str, Any], events: Iterable[Event]) -> None:
    is_compressed = str(out).endswith(".gz")
    with gzip.open(out, "wt", 6) if is_compressed else open(out, "w", encoding="utf-8") as file:
        head = json.dumps(fields)
        file.write(head[:-1] + (",\n" if fields else "") + '"traceEvents":[')
        separator = "\n"
        for event in events:
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
