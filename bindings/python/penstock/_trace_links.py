"""What belongs together in a trace: collectives of all ranks, and waits with what they are for."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from penstock._trace_files import Slice, Track
from penstock._trace_kinds import kind_of
from penstock._trace_steps import (
    COMPUTE_STREAM,
    GRAPH,
    MEMORY_FULL,
    WAIT_GRADIENTS,
    WAITS_OF_REDUCTIONS,
    Spans,
    innermost,
    is_wait,
    union,
)


@dataclass(eq=False, repr=False)  # tasks refer to each other
class Task:
    """A task of a lane, with its neighbor in time.

    Attributes
    ----------
    lane : str
        The lane's name.
    rank : int
        Whose it is.
    one : Slice
        When it ran.
    before : Task, optional
        The task that began before it on that lane.
    collective : dict
        By rank, the same collective: itself alone where not all ranks have it.
    first : Task, optional
        What its operation did before, on the lane that it shares with other ranks: it pushed
        gradients, which are added up here.
    """

    lane: str
    rank: int
    one: Slice
    before: Task | None = None
    collective: dict[int, Task] = field(default_factory=dict)
    first: Task | None = None

    @property
    def opening(self) -> Task:
        """What its operation began with: itself, mostly."""
        return self.first or self

    @property
    def last(self) -> Task:
        """What the rank that came last has of the collective."""
        return max(self.collective.values(), key=lambda task: (task.one.begin, task.rank))


@dataclass(eq=False, repr=False)
class Wait:
    """A wait of a thread, or of the compute stream of a GPU; `task` is what for, if known."""

    one: Slice
    task: Task | None

    @property
    def name(self) -> str:
        """What for."""
        return self.one.name.partition(" ")[2] or self.one.name

    @property
    def is_for_gradients(self) -> bool:
        """Whether a reduction is waited for."""
        return self.one.name in WAITS_OF_REDUCTIONS


class Rank:
    """What one rank has.

    Parameters
    ----------
    number : int
        The rank.
    tracks : list of Track
        Its tracks.

    Attributes
    ----------
    tasks : list of Task
        By lanes, in the order in which they began.
    waits : list of Wait
        The earliest first; none of them within another.
    computing : list of Slice
        The innermost slices of the thread that trains, the earliest first, without overlap and
        without waits; none where a GPU computes: threads only tell when they have launched it.
    optimizers : list of Slice
        When optimizers stepped, the earliest first.
    """

    _refusals: dict[str, _Refusals]  # by the names of groups

    def __init__(self, number: int, tracks: list[Track]) -> None:
        self.number = number
        lanes = [track for track in tracks if track.is_lane]
        self.tasks = [task for lane in lanes for task in _tasks(number, lane)]
        _tie_parts(self.tasks)
        self._busy = {lane.name: Spans(union(lane.slices)) for lane in lanes}
        self.waits = list(_waits(tracks, self.tasks))
        self._waiting = Spans([(wait.one.begin, wait.one.end) for wait in self.waits])
        self._wait_begins = [wait.one.begin for wait in self.waits]
        self.computing = _computing(tracks)
        self.optimizers = [
            s for t in tracks if not t.is_lane for s in t.slices if s.name == "optimizer"
        ]
        self._computing_ends = [one.end for one in self.computing]
        self._refusals = _refusals(tracks, self.tasks)

    def wait_before(self, time: float) -> Wait | None:
        """Return the last wait that began before a time."""
        at = bisect.bisect_left(self._wait_begins, time)
        return self.waits[at - 1] if at else None

    def waits_between(self, begin: float, end: float) -> list[Wait]:
        """Return the waits that begin between two times."""
        first = bisect.bisect_left(self._wait_begins, begin)
        return self.waits[first : bisect.bisect_left(self._wait_begins, end)]

    def computed(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield names and lengths of what ran between two times; "" where nothing is known."""
        left = max(end - begin, 0.0)
        for one in self.computing[bisect.bisect_right(self._computing_ends, begin) :]:
            if one.begin >= end:
                break
            length = min(one.end, end) - max(one.begin, begin)
            left -= length
            yield one.name, length
        yield "", max(left, 0.0)

    def refused_at(self, task: Task) -> float | None:
        """Return when a gather would have been launched if memory had not been full; None: then."""
        found = self._refusals.get(task.one.name)
        return None if found is None else found.first_before(task.one.begin)

    def busy_between(self, lane: str, begin: float, end: float) -> float:
        """Return for how long a lane had tasks between two times."""
        return self._busy[lane].between(begin, end)

    def waited_between(self, begin: float, end: float) -> float:
        """Return for how long compute waited between two times."""
        return self._waiting.between(begin, end)


def linked(ranks: dict[int, list[Track]]) -> dict[int, Rank]:
    """Tie together what the ranks have, in one time.

    Parameters
    ----------
    ranks : dict
        Each rank's tracks.

    Returns
    -------
    dict
        By rank.
    """
    found = {rank: Rank(rank, tracks) for rank, tracks in ranks.items()}
    for collective in _collectives(found):
        for task in collective.values():
            task.collective = collective
    return found


def collectives_of(ranks: dict[int, Rank]) -> Iterator[dict[int, Task]]:
    """Yield the collectives that all ranks have, if there are several."""
    first = next(iter(ranks.values()), None)
    if first is None or len(ranks) == 1:
        return
    for task in first.tasks:
        if len(task.collective) == len(ranks):
            yield task.collective


# ---- tasks --------------------------------------------------------------------------------------


def _tasks(rank: int, lane: Track) -> Iterator[Task]:
    before: Task | None = None
    for one in lane.slices:  # in the order in which they began
        task = Task(lane.name, rank, one, before)
        task.collective = {rank: task}
        yield task
        before = task


_SHARED = ("gather", "reduce")  # the first words of names of lanes whose tasks peers have, too


def _tie_parts(tasks: list[Task]) -> None:
    """Find what operations of two parts have begun with: it has the same name and ticket."""
    opened: dict[tuple[str, int], Task] = {}
    for task in sorted(tasks, key=lambda task: task.one.begin):
        if "ticket" in task.one.args:
            key = task.one.name, task.one.args["ticket"]
            if task.lane.startswith(_SHARED):
                opened[key] = task
            else:
                task.first = opened.pop(key, None)


def _collectives(ranks: dict[int, Rank]) -> Iterator[dict[int, Task]]:
    found: dict[tuple[str, str, int], list[Task]] = defaultdict(list)
    for rank in ranks.values():
        for task in rank.tasks:
            if "ticket" in task.one.args:
                found[task.lane, task.one.name, task.one.args["ticket"]].append(task)
    for tasks in found.values():
        for collective in _occurrences(tasks):
            if len(collective) == len(ranks) > 1:
                yield collective


def _occurrences(tasks: Iterable[Task]) -> Iterator[dict[int, Task]]:
    """Tell launches of a replayed ticket apart: each ends on all ranks together."""
    present: dict[int, Task] = {}
    for task in sorted(tasks, key=lambda task: task.one.end):
        if task.rank in present:
            yield present
            present = {}
        present[task.rank] = task
    yield present


# ---- waits --------------------------------------------------------------------------------------


def _waits(tracks: list[Track], tasks: list[Task]) -> Iterator[Wait]:
    index: dict[_WaitKey, _Candidates] = defaultdict(_Candidates)
    for task in sorted(tasks, key=lambda task: task.one.begin):
        for name in _names_for_waits(task):
            index[name, task.one.args.get("ticket")].add(task)
            index[name, None].add(task)
    slices = [s for t in tracks if not t.is_lane for s in t.slices if is_wait(s.name)]
    until = -math.inf
    for one in sorted(slices, key=attrgetter("begin")):
        if one.end > until:
            key = (one.name, one.args.get("ticket"))
            found = index[key].last_before(one.end) if key in index else None
            yield Wait(Slice(one.name, max(one.begin, until), one.end, one.args), found)
            until = one.end


_WaitKey = tuple[str, int | None]  # a wait's name and ticket


class _Candidates:
    """Tasks that a wait may be for, the earliest first: replays have the same ticket."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        self._begins.append(task.one.begin)
        self._tasks.append(task)

    def last_before(self, time: float) -> Task | None:
        at = bisect.bisect_left(self._begins, time)
        return self._tasks[at - 1] if at else None


def _names_for_waits(task: Task) -> Iterator[str]:
    yield f"wait {task.one.name}"
    if kind_of(task.one.name, task.lane) == "reduce":
        yield WAIT_GRADIENTS


# ---- memory -------------------------------------------------------------------------------------


class _Refusals:
    """When a group found no memory, and when its gathers began after all."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.begins: list[float] = []

    def first_before(self, begin: float) -> float | None:
        """Return the first one of a gather that began then: since the gather before it."""
        at = bisect.bisect_left(self.begins, begin)
        first = bisect.bisect_left(self.times, self.begins[at - 1] if at else -math.inf)
        return next((time for time in self.times[first : first + 1] if time <= begin), None)


def _refusals(tracks: list[Track], tasks: list[Task]) -> dict[str, _Refusals]:
    found: dict[str, _Refusals] = {}
    for track in tracks:
        for one in track.slices:
            if not track.is_lane and one.name.startswith(MEMORY_FULL):
                name = one.name.removeprefix(MEMORY_FULL)
                found.setdefault(name, _Refusals()).times.append(one.begin)
    for task in sorted(tasks, key=lambda task: task.one.begin):
        if task.one.name in found:
            found[task.one.name].begins.append(task.one.begin)
    return found


# ---- compute ------------------------------------------------------------------------------------


def _computing(tracks: list[Track]) -> list[Slice]:
    threads = [t for t in tracks if not (t.is_lane or t.name.startswith("worker "))]
    training = [t for t in threads if any(one.name == "step" for one in t.slices)]
    if not training or any(map(_is_of_gpu, tracks)):
        return []
    return [one for one in innermost(training[0].slices) if not is_wait(one.name)]


def _is_of_gpu(track: Track) -> bool:
    """Whether it is there on GPUs alone, where compute does not go on when its thread does."""
    has_graphs = track.is_lane and any(one.name == GRAPH for one in track.slices)
    return has_graphs or track.name == COMPUTE_STREAM


def compute_of(rank: Rank, steps: list[Slice]) -> list[Slice]:
    """Return what compute does between its waits; of a GPU only in steps, and without names."""
    return rank.computing or list(_between_waits(rank, steps))


def _between_waits(rank: Rank, steps: Iterable[Slice]) -> Iterator[Slice]:
    """Yield what a GPU's compute stream does in steps, of which only its waits are known."""
    for step in steps:
        at = step.begin
        for wait in rank.waits_between(step.begin, step.end):
            if wait.one.begin > at:
                yield Slice("compute", at, wait.one.begin, {})
            at = max(at, wait.one.end)
        if step.end > at:
            yield Slice("compute", at, step.end, {})
