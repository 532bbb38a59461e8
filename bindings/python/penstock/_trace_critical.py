"""What decides the length of a step: its critical path over the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock._trace_files import Slice
from penstock._trace_links import Rank, Task, Wait

KINDS = ("compute", "moving", "launching", "waking", "unknown wait")
BETWEEN = "between steps"
_AT_ONCE = 50.0  # microseconds: a task that begins so soon behind another one waited for it


@dataclass
class Part:
    """A part of the path, in microseconds.

    Attributes
    ----------
    rank : int, optional
        Where it is spent; None of what moves, which all ranks do.
    kind : str
        "compute"; "moving", from when the last rank came to a collective to its end; "launching",
        in which a task should have begun and did not; "waking", from the end of a task to the end
        of a wait for it; "unknown wait", for what is not in the trace.
    lane : str
        The task's; "" of compute.
    name : str
        The task's or, of compute, the innermost slice's.
    begin, end : float
        When.
    """

    rank: int | None
    kind: str
    lane: str
    name: str
    begin: float
    end: float


def critical_path(ranks: dict[int, Rank], steps: dict[int, Slice]) -> list[Part]:
    """Follow what a step's end had to wait for, back to the first rank's begin of the step.

    Where compute waited, the path goes on with the task for which it did; from a collective to the
    rank that came last to it; and from there to what that rank did before: to the task before it
    on the lane, if that had only just ended, else to the rank's compute. The parts follow each
    other without a gap.

    Parameters
    ----------
    ranks : dict
        By rank what it has.
    steps : dict
        By rank the step.

    Returns
    -------
    list of Part
        The earliest first.
    """
    if not steps:
        return []
    last = max(steps, key=lambda rank: (steps[rank].end, rank))
    walk = _Walk(ranks, min(step.begin for step in steps.values()), steps[last].end)
    walk.go_back(ranks[last])
    return walk.parts[::-1]


_Found = TypeVar("_Found", Wait, Task)


class _Walk:
    """The way back; each wait and each task is passed once at most, so that it ends."""

    def __init__(self, ranks: dict[int, Rank], begin: float, end: float) -> None:
        self.parts: list[Part] = []  # the latest first
        self._ranks = ranks
        self._begin = begin
        self._time = end
        self._passed: set[int] = set()

    def go_back(self, rank: Rank) -> None:
        """Go from a rank's compute to the begin."""
        while self._time > self._begin:
            wait = self._first_time(rank.wait_before(self._time))
            if wait is None:
                self._until(self._begin, "compute", rank.number)
                return
            self._until(wait.one.end, "compute", rank.number)
            rank = self._through_wait(rank, wait)

    def _first_time(self, found: _Found | None) -> _Found | None:
        """Return a wait or a task, unless it was passed."""
        if found is None or id(found) in self._passed:
            return None
        self._passed.add(id(found))
        return found

    def _until(self, begin: float, kind: str, rank: int | None, task: Task | None = None) -> None:
        """Go back to a time, but not behind the begin of the step."""
        begin, end = max(begin, self._begin), self._time
        if begin >= end:
            return
        self._time = begin
        lane, name = (task.lane, task.one.name) if task else ("", "")
        self.parts.append(Part(rank, kind, lane, name, begin, end))

    def _through_wait(self, rank: Rank, wait: Wait) -> Rank:
        task = wait.task
        if task is None or task.one.end <= wait.one.begin:
            kind = "unknown wait" if task is None else "waking"
            self._until(wait.one.begin, kind, rank.number, task)
            return rank
        self._until(task.one.end, "waking", rank.number, task)
        while task is not None and self._first_time(task):
            last = task.last
            rank = self._ranks[last.rank]
            self._until(last.one.begin, "moving", None, task)
            task, since = self._before(rank, last)
            self._until(since, "launching", rank.number, last)
        return rank

    def _before(self, rank: Rank, task: Task) -> tuple[Task | None, float]:
        """Return what a task began behind, and when that ended; no task: compute's thread."""
        before, first, asked = task.before, task.first, self._asked(rank)
        if first is not None:
            since = max(one.one.end for one in first.collective.values())
            if before is not None and before.one.end > since:
                return before, before.one.end
            return first, since
        if before is None:
            return None, asked
        is_queued = self._time - before.one.end <= _AT_ONCE or before.one.end > asked
        return (before, before.one.end) if is_queued else (None, asked)

    def _asked(self, rank: Rank) -> float:
        """Return when a rank did something last: now, or before the wait that it is in."""
        wait = rank.wait_before(self._time)
        return wait.one.begin if wait and wait.one.end >= self._time else self._time


# ---- sums ---------------------------------------------------------------------------------------


def summed(parts: list[Part], ranks: dict[int, Rank]) -> dict[str, Any]:
    """Add up a path.

    Returns
    -------
    dict
        ``length_us``; ``ranks``: what is spent on each that it goes through; ``parts``: the longest
        first, with ``kind``, ``rank``, ``lane``, ``name`` and ``us``; compute is divided by the
        innermost slices of the thread that trains.
    """
    sums: _Sums = defaultdict(float)
    for part in parts:
        for name, length in _pieces(part, ranks):
            sums[part.kind, part.rank, part.lane, name] += length
    return _sum(sums)


def mean_path(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the critical paths of a report's steps, divided by how many there are."""
    sums: _Sums = defaultdict(float)
    for step in steps:
        for part in step["critical_path"]["parts"]:
            key = (part["kind"], part["rank"], part["lane"], part["name"])
            sums[key] += part["us"] / len(steps)
    return _sum(sums)


_Sums = dict[tuple[str, int | None, str, str], float]


def _sum(sums: _Sums) -> dict[str, Any]:
    spent: dict[int, float] = defaultdict(float)
    parts: list[dict[str, Any]] = []
    for (kind, rank, lane, name), us in sorted(sums.items(), key=lambda item: -item[1]):
        if us > 0:
            parts.append({"kind": kind, "rank": rank, "lane": lane, "name": name, "us": us})
        if us > 0 and rank is not None:
            spent[rank] += us
    return {"length_us": sum(sums.values()), "ranks": dict(sorted(spent.items())), "parts": parts}


def _pieces(part: Part, ranks: dict[int, Rank]) -> Iterator[tuple[str, float]]:
    if part.rank is None or part.kind != "compute":
        yield part.name, part.end - part.begin
        return
    rank = ranks[part.rank]
    for name, length in rank.computed(part.begin, part.end):
        yield name or (BETWEEN if rank.computing else "compute"), length
