"""The rules that trace viewers enforce: ``violations(content)``, ``check_file(path)``."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PHASES = set("XstfCMbe")
TOLERANCE = 0.0005  # of ts + dur, each rounded to the nanosecond, in microseconds


def violations(content: dict[str, Any]) -> list[str]:
    """List what a viewer would drop or misread in a parsed trace file; empty if all is well."""
    events = content.get("traceEvents")
    if not isinstance(events, list):
        return ["there is no list traceEvents"]
    found = _check_head(content)
    for number, event in enumerate(events):
        found += [f"event {number} ({event}): {text}" for text in _check_event(event)]
    if found:
        return found  # the rest would only stumble
    return (
        _check_nesting(events) + _check_flows(events) + _check_pairs(events) + _check_names(events)
    )


def check_file(path: str | Path) -> dict[str, Any]:
    """Parse a trace file strictly and raise AssertionError if it breaks a rule."""
    content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    found = violations(content)
    if found:
        raise AssertionError(f"{path}: {len(found)} rules broken\n" + "\n".join(found[:20]))
    return content


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_index(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < 2**32


def _check_head(content: dict[str, Any]) -> list[str]:
    found = []
    info = content.get("distributedInfo", {})
    if not isinstance(info.get("backend"), str):
        found.append("distributedInfo.backend is missing")
    if not _is_index(info.get("world_size"), 1):
        found.append("distributedInfo lacks world_size")
    ranks = {event.get("pid") for event in content["traceEvents"] if isinstance(event, dict)}
    if ("rank" in info) != (len(ranks) == 1) or not _is_index(info.get("rank", 0), 0):
        found.append("distributedInfo has no rank, or one of several")
    if not isinstance(content.get("baseTimeNanoseconds"), int):
        found.append("baseTimeNanoseconds is no integer")
    return found


def _check_event(event: Event) -> list[str]:
    found = []
    phase = event.get("ph")
    if phase not in PHASES:
        found.append(f"unknown phase {phase!r}")
    if not isinstance(event.get("name"), str):
        found.append("no name")
    if not _is_index(event.get("pid"), 1):
        found.append("pid is no index from 1")
    if not _is_index(event.get("tid"), 1):
        found.append("tid is no index from 1")
    elif event["tid"] == event.get("pid"):
        found.append("tid is pid: a viewer makes it the main thread, above all others")
    if phase != "M":
        found += _check_time(event, "ts")
    if phase == "X":
        found += _check_time(event, "dur")
    if phase in set("stfbe") and not (0 < event.get("id", 0) < 2**53 and event.get("cat")):
        found.append("no id below 2^53 or no cat")
    if phase == "f" and event.get("bp") != "e":
        found.append('an arrow ends without "bp":"e"')
    args = event.get("args", {})
    if phase == "C" and not (args and all(_is_number(value) for value in args.values())):
        found.append("a counter without numbers")
    return found


def _check_time(event: Event, key: str) -> list[str]:
    value = event.get(key)
    if not _is_number(value):
        return [f"{key} is no number"]
    if value < 0:
        return [f"{key} is negative"]
    if value > 2**53 / 1000:
        return [f"{key} is too large to keep nanoseconds: use baseTimeNanoseconds"]
    return []


def _slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        slices.sort(key=lambda event: event["ts"])  # stable, as viewers sort
    return tracks


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _check_nesting(events: list[Event]) -> list[str]:
    found = []
    for (pid, tid), slices in _slices(events).items():
        open_slices: list[Event] = []
        for event in slices:
            while open_slices and _end(open_slices[-1]) <= event["ts"] + TOLERANCE:
                open_slices.pop()
            if open_slices and _end(event) > _end(open_slices[-1]) + TOLERANCE:
                found.append(f"pid {pid} tid {tid}: {event} does not nest in {open_slices[-1]}")
            open_slices.append(event)
    return found


def _check_flows(events: list[Event]) -> list[str]:
    found = []
    tracks = {key: _OpenSlices(slices) for key, slices in _slices(events).items()}
    nothing = _OpenSlices([])
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"], event["cat"], event["name"]].append(event)
            if not tracks.get((event["pid"], event["tid"]), nothing).at(event["ts"]):
                found.append(f"{event} lies in no slice")
    for key, ends in flows.items():
        phases = Counter(event["ph"] for event in ends)
        if phases["s"] != 1 or phases["f"] != 1:
            found.append(f"flow {key} has {phases['s']} starts and {phases['f']} ends")
            continue
        times = {event["ph"]: event["ts"] for event in ends}
        if times["f"] < times["s"]:
            found.append(f"flow {key} ends before it starts")
    return found


class _OpenSlices:
    """Finds the times at which a track has an open slice."""

    def __init__(self, slices: list[Event]):
        self.begins = [event["ts"] for event in slices]
        self.reach = list(itertools.accumulate((_end(event) for event in slices), max))
        self.moments = {event["ts"] for event in slices if event["dur"] == 0}

    def at(self, time: float) -> bool:
        """Ends do not count; a slice of no length is open in its moment."""
        begun = bisect.bisect_right(self.begins, time)
        return time in self.moments or (begun > 0 and time < self.reach[begun - 1])


def _check_pairs(events: list[Event]) -> list[str]:
    found = []
    pairs = defaultdict(dict)
    for event in events:
        if event["ph"] not in "be":
            continue
        pair = pairs[event["pid"], event["cat"], event["id"]]
        if event["ph"] in pair:
            found.append(f"a second {event['ph']} of an asynchronous slice: {event}")
        pair[event["ph"]] = event
    for key, pair in pairs.items():
        if len(pair) != 2:
            found.append(f"asynchronous slice {key} has no {'e' if 'b' in pair else 'b'}")
        elif pair["e"]["ts"] < pair["b"]["ts"] or pair["e"]["name"] != pair["b"]["name"]:
            found.append(f"asynchronous slice {key} ends before it begins or under another name")
    return found


def _check_names(events: list[Event]) -> list[str]:
    """Each process and each track is named, and once."""
    named = Counter()
    used = set()
    for event in events:
        pid, tid = event["pid"], event["tid"]
        if event["ph"] != "M":
            used |= {(pid, None), (pid, tid)}
        elif event["name"] == "process_name":
            named[pid, None] += 1
        elif event["name"] == "thread_name":
            named[pid, tid] += 1
    found = [f"pid {pid} tid {tid} has no name" for pid, tid in used if not named[pid, tid]]
    return found + [f"{key} is named {count} times" for key, count in named.items() if count > 1]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check_file(argument)
        print(f"{argument}: clean")
