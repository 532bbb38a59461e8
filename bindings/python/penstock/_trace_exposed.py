"""Why compute waits: exposed communication by groups and causes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock._trace_files import Interval, Slice
from penstock._trace_links import Rank, Task, Wait

CAUSES = {
    "memory_full": "memory had no room for it, and its lane was idle",
    "late_launch": "it was not launched, and its lane was idle",
    "lane_busy": "it was not launched, and its lane was busy with what came before it",
    "late_rank": "another rank had not come to it",
    "moving": "its data moved",
    "reduction_tail": "the last gradients moved",
    "optimizer": "the optimizer waited",
    "waking": "it had ended",
    "unknown": "what it waited for is not in the trace",
}


def exposed_by_cause(ranks: dict[int, Rank], spans: dict[int, Interval] | None) -> dict[str, Any]:
    """Divide the waits of compute.

    Parameters
    ----------
    ranks : dict
        By rank what it has, in one time.
    spans : dict, optional
        By rank when its waits have to begin; None: at any time.

    Returns
    -------
    dict
        ``groups``: the longest first, what was waited for: ``group``, ``kind`` ("gather" or
        "reduce"), ``us`` (of a rank on average) and ``causes``, the part of each of :data:`CAUSES`
        that there is. ``late``: for each rank how long (of a rank on average) it was waited for
        because it came last.
    """
    groups: dict[tuple[str, str], dict[str, float]] = {}
    late: dict[int, float] = dict.fromkeys(ranks, 0.0) if len(ranks) > 1 else {}
    for rank in ranks.values():
        for wait in rank.waits:
            if spans is None or _is_in(wait.one, spans.get(rank.number)):
                key = (wait.name, "reduce" if wait.is_for_gradients else "gather")
                causes = groups.setdefault(key, defaultdict(float))
                for cause, length in _causes(rank, wait):
                    causes[cause] += length / len(ranks)
                    if cause == "late_rank" and wait.task:
                        late[wait.task.opening.last.rank] += length / len(ranks)
    rows = [
        {"group": name, "kind": kind, "us": sum(causes.values()), "causes": dict(causes)}
        for (name, kind), causes in groups.items()
    ]
    return {"groups": sorted(rows, key=lambda row: -row["us"]), "late": late}


def _is_in(one: Slice, span: Interval | None) -> bool:
    return span is not None and span[0] <= one.begin < span[1]


def _causes(rank: Rank, wait: Wait) -> Iterator[tuple[str, float]]:
    one, task = wait.one, wait.task
    if _is_within(one, rank.optimizers):
        yield "optimizer", one.duration
    elif task is None:
        yield "unknown", one.duration
    else:
        launched, there, ended = _times(one, task)
        lane = task.opening.lane
        busy = min(rank.busy_between(lane, one.begin, launched), launched - one.begin)
        late, moving, idle = launched - one.begin - busy, ended - there, _idle(rank, task)
        late_full = min(late, idle)
        moving_full = min(moving, idle - late_full)  # it would have ended so much earlier
        moving -= moving_full
        if wait.is_for_gradients:  # one for all that end on a stream: its lane moved the others
            moved = {"reduction_tail": busy + moving}
        else:
            moved = {"lane_busy": busy, "moving": moving}
        parts = {
            "memory_full": late_full + moving_full,
            "late_launch": late - late_full,
            "late_rank": there - launched,
            "waking": one.end - ended,
        } | moved
        yield from ((cause, length) for cause, length in parts.items() if length > 0)


def _idle(rank: Rank, task: Task) -> float:
    """Return for how long its lane was idle while memory was full: by so much it is late."""
    since, begin = rank.refused_at(task), task.one.begin
    if since is None:
        return 0.0
    return max(begin - since - rank.busy_between(task.lane, since, begin), 0.0)


def _times(wait: Slice, task: Task) -> tuple[float, float, float]:
    """Return when a task began, was there on all ranks, and ended, as far as it was waited for."""

    def within(time: float, lowest: float) -> float:
        return min(max(time, lowest), wait.end)

    launched = within(task.opening.one.begin, wait.begin)
    ended = within(task.one.end, launched)
    there = min(within(task.opening.last.one.begin, launched), ended)
    return launched, there, ended


def _is_within(one: Slice, others: list[Slice]) -> bool:
    at = bisect.bisect(others, one.begin, key=lambda other: other.begin)
    return bool(at) and others[at - 1].end >= one.end
