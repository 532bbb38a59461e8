"""`python -m penstock.top`: what the jobs of this machine do right now.

Each rank has a page of memory that it writes, and that this command maps: steps and where the
training is, waits for communication, lanes and their oldest unfinished tasks, memory. Nothing is
asked of the job, which may be stopped, stuck or be a program in C. Ranks of other machines are not
seen. Needs neither torch nor the library.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby

from penstock._page import Head, Position, find_pages, read_page, state_of, text_of, unit_names

_CLEAR = "\x1b[H\x1b[J"  # the cursor to the top, and everything away


@dataclass
class Task:
    """The oldest unfinished task of a rank.

    Attributes
    ----------
    lane, name : str
        On which one, and what it is called; empty: it has no name.
    ticket : int
        Of a collective: its number; else 0.
    seconds : float
        Since it was launched, or was first seen unfinished.
    """

    lane: str
    name: str
    ticket: int
    seconds: float


@dataclass
class Row:
    """What is known of a rank.

    Attributes
    ----------
    state : str
        What is wrong with its process; empty: nothing.
    step : int
        The present one, from 0.
    phase, unit : str
        Where the training is in it: empty before the first forward; empty: all of the model.
    is_behind : bool
        Whether it has left that.
    place_seconds : float, optional
        Since when.
    step_seconds : float, optional
        What a step takes.
    exposed_share : float, optional
        Of the time, in which the training thread waited for communication; on GPUs for launches
        alone.
    idle_share : float, optional
        Of the time, in which the compute stream stood still for communication, by the GPU's clock.
    bandwidths : dict
        Bytes a second by lane, while it moved some.
    memory : dict
        Bytes by kind.
    oldest : Task, optional
        None: all that was launched has ended.
    """

    rank: int
    pid: int
    state: str
    step: int
    phase: str
    unit: str
    is_behind: bool
    place_seconds: float | None
    step_seconds: float | None
    exposed_share: float | None
    idle_share: float | None
    bandwidths: dict[str, float]
    memory: dict[str, int]
    oldest: Task | None


@dataclass
class Sums:
    """What grows while a rank trains: nanoseconds, bytes and counts."""

    trained: int
    steps: int
    steps_ns: int
    exposed_ns: int
    stalled_ns: int
    timed: int
    untimed: int
    lanes: dict[str, tuple[int, int]]  # bytes, and nanoseconds in which they moved


class Watched:
    """A rank whose page is mapped, and what it had when it was looked at before.

    Shares and bandwidths are of the time since then; where no step has ended since, a step takes
    what it took before. At the first look they are of all the time since the training began.
    """

    def __init__(self, pid: int, page: mmap.mmap, head: Head) -> None:
        self.pid = pid
        self.head = head
        self._page = page
        self._names: list[str] = []
        self._before = Sums(0, 0, 0, 0, 0, 0, 0, {})
        self._row: Row | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Tells it from all others."""
        return self.pid, self.head.descriptor

    @property
    def job(self) -> str:
        """Which one it is a rank of."""
        return text_of(self.head.job)

    @property
    def is_closed(self) -> bool:
        """Whether no runtime has the page any more."""
        return read_page(self._page) is None

    def look(self) -> Row:
        """Read the page; once its process has ended, or the model is closed, what was last."""
        now = time.monotonic_ns()
        state = state_of(self.pid)
        head = read_page(self._page)
        if head is not None:
            self.head = head
        elif not state:
            state = "has closed its model"
        if len(self._names) < self.head.unit_count:
            self._names = unit_names(self._page, self.head)
        sums = _sums_of(self.head, now)
        self._row = self._row_of(state, sums, now)
        self._before = sums
        return self._row

    def _row_of(self, state: str, sums: Sums, now: int) -> Row:
        head, place = self.head, Position(self.head.place.place, self._names)
        engine, before = head.engine, self._before
        if sums.exposed_ns < before.exposed_ns or sums.stalled_ns < before.stalled_ns:
            before = Sums(0, 0, 0, 0, 0, 0, 0, {})  # its engine has begun anew
        trained = sums.trained - before.trained
        is_timed = sums.timed > before.timed and sums.untimed == before.untimed
        return Row(
            rank=head.rank,
            pid=self.pid,
            state=state,
            step=place.step,
            phase=place.phase,
            unit=place.unit,
            is_behind=place.is_behind,
            place_seconds=_age(head.place.since, now),
            step_seconds=self._step_seconds(sums),
            exposed_share=_share(sums.exposed_ns - before.exposed_ns, trained),
            idle_share=_share(sums.stalled_ns - before.stalled_ns, trained) if is_timed else None,
            bandwidths=_bandwidths(sums, before),
            memory={
                "shards": engine.shard_bytes,
                "gathers": engine.gathered_bytes,
                "buckets": engine.bucket_bytes,
                "pinned": head.pinned_bytes,
            },
            oldest=_oldest(head, now),
        )

    def _step_seconds(self, sums: Sums) -> float | None:
        steps = sums.steps - self._before.steps
        if steps <= 0:
            return None if self._row is None else self._row.step_seconds
        return (sums.steps_ns - self._before.steps_ns) / steps / 1e9


def _sums_of(head: Head, now: int) -> Sums:
    place, engine = head.place, head.engine
    running = max(0, now - place.step_began) if place.count else 0
    lanes: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for lane in head.lanes[: head.lane_count]:
        moved = lanes[text_of(lane.name)]
        lanes[text_of(lane.name)] = moved[0] + lane.bytes, moved[1] + lane.busy_ns
    return Sums(
        trained=place.steps_ns + running,
        steps=place.steps,
        steps_ns=place.steps_ns,
        exposed_ns=engine.exposed_ns,
        stalled_ns=engine.stalled_ns,
        timed=engine.timed_waits,
        untimed=engine.untimed_waits,
        lanes=dict(lanes),
    )


def _age(since: int, now: int) -> float | None:
    return max(0, now - since) / 1e9 if since else None


def _share(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def _bandwidths(sums: Sums, before: Sums) -> dict[str, float]:
    found = {}
    for name, (moved, busy) in sums.lanes.items():
        old = before.lanes.get(name, (0, 0))
        if moved > old[0] and busy > old[1]:
            found[name] = (moved - old[0]) / (busy - old[1]) * 1e9
    return dict(sorted(found.items()))


def _oldest(head: Head, now: int) -> Task | None:
    open_lanes = [lane for lane in head.lanes[: head.lane_count] if lane.since]
    if not open_lanes:
        return None
    lane = min(open_lanes, key=lambda lane: lane.since)
    seconds = max(0, now - lane.since) / 1e9
    return Task(text_of(lane.name), text_of(lane.task), lane.ticket, seconds)


# ---- jobs ---------------------------------------------------------------------------------------


def find_ranks() -> list[Watched]:
    """Find the ranks of all jobs of this user on this machine, by job and rank."""
    found = []
    for pid, page in find_pages():
        head = read_page(page)
        if head is not None:
            found.append(Watched(pid, page, head))
    return sorted(found, key=lambda one: (one.job, one.head.rank, one.pid))


class Watch:
    """The ranks of the jobs that are watched; those that come are added, those that end stay."""

    def __init__(self, ranks: Iterable[Watched]) -> None:
        self._ranks = {one.key: one for one in ranks}
        self._jobs = {one.job for one in self._ranks.values()}
        self._is_whole = False  # all ranks were there at the last look

    def look(self) -> list[tuple[str, int, list[Row]]]:
        """Return each job's name, its number of ranks, and what is known of those that are seen."""
        for one in [] if self._is_whole else find_ranks():
            known = self._ranks.get(one.key)  # whose number another page may have by now
            if one.job in self._jobs and (known is None or known.is_closed):
                self._ranks[one.key] = one
        ranks = sorted(self._ranks.values(), key=lambda one: (one.job, one.head.rank, one.pid))
        jobs = [
            (job, max(one.head.world_size for one in own), [one.look() for one in own])
            for job, group in groupby(ranks, key=lambda one: one.job)
            for own in [list(group)]
        ]
        self._is_whole = all(
            len(rows) >= size and not any(_has_gone(row) for row in rows) for _, size, rows in jobs
        )
        return jobs


def choose(ranks: list[Watched], target: str) -> list[Watched]:
    """Return the ranks of the jobs that are meant, by name or by one of their processes."""
    jobs = {one.job for one in ranks if target in (str(one.pid), one.job)}
    return [one for one in ranks if one.job in jobs]


# ---- in words -----------------------------------------------------------------------------------


def format_jobs(ranks: Iterable[Watched]) -> str:
    """Return a table of jobs: how many ranks are here, of which processes, and at which step."""
    rows = [["job", "ranks here", "step", "processes"]]
    for job, group in groupby(ranks, key=lambda one: one.job):
        own = list(group)
        here = f"{len({one.head.rank for one in own})} of {max(o.head.world_size for o in own)}"
        steps = [one.head.place.place >> 32 for one in own]
        rows.append([job, here, str(min(steps)), " ".join(str(one.pid) for one in own)])
    return _table(rows, "<><<")


def format_job(job: str, size: int, rows: list[Row]) -> str:
    """Return what is known of a job: a table of figures, and one of what its ranks are at."""
    unseen = sorted(set(range(size)) - {row.rank for row in rows})
    head = f"{job}: {size - len(unseen)} of {size} ranks"
    if unseen:
        head += f"; not seen, as on other machines or ended: {_ranges(unseen)}"
    lanes = sorted({name for row in rows for name in row.bandwidths})
    kinds = [kind for kind in rows[0].memory if any(row.memory[kind] for row in rows)]
    figures = [["rank", "process", "step", "step time", "exposed", "idle", *lanes, *kinds]]
    figures += [_figures(row, lanes, kinds) for row in rows]
    places = [["rank", "is", "since", "oldest unfinished task", "age"]]
    places += [_place(row) for row in rows]
    return f"{head}\n{_table(figures, '>')}\n{_table(places, '><><>')}"


def _figures(row: Row, lanes: list[str], kinds: list[str]) -> list[str]:
    moved = [row.bandwidths.get(lane) for lane in lanes]
    return [
        str(row.rank),
        str(row.pid),
        str(row.step),
        _told(row.step_seconds, lambda seconds: f"{seconds * 1e3:.1f} ms"),
        _told(row.exposed_share, lambda share: f"{share:.1%}"),
        _told(row.idle_share, lambda share: f"{share:.1%}"),
        *(_told(rate, lambda rate: f"{rate / 1e9:.2f} GB/s") for rate in moved),
        *(f"{row.memory[kind] / 2**20:.1f} MiB" for kind in kinds),
    ]


def _place(row: Row) -> list[str]:
    if not row.phase:
        where = "before the first forward"
    else:
        where = "behind " if row.is_behind else "in "
        where += f"{row.unit!r} ({row.phase})" if row.unit else f"the {row.phase}"
    if row.state:
        where = f"{row.state}; {where}"
    task = row.oldest
    ticket = f" (ticket {task.ticket})" if task is not None and task.ticket else ""
    return [
        str(row.rank),
        where,
        _told(row.place_seconds, _seconds),
        "-" if task is None else f"{task.name or 'a task'} on {task.lane}{ticket}",
        _told(None if task is None else task.seconds, _seconds),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _told(value: float | None, tell: Callable[[float], str]) -> str:
    return "-" if value is None else tell(value)


def _table(rows: list[list[str]], sides: str) -> str:
    """Align columns: by one side each, the last one of them for all that follow."""
    sides = sides.ljust(len(rows[0]), sides[-1])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    line = "  ".join(columns)
    return "".join(f"{line.format(*row).rstrip()}\n" for row in rows)


def _ranges(ranks: list[int]) -> str:
    """Name ranks, those in a row as one."""
    parts = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        own = [rank for _, rank in group]
        parts.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    return ", ".join(parts)


# ---- the command --------------------------------------------------------------------------------


def _print_json(jobs: list[tuple[str, int, list[Row]]]) -> None:
    found = [
        {"job": job, "world_size": size, "ranks": [asdict(row) for row in rows]}
        for job, size, rows in jobs
    ]
    print(json.dumps({"jobs": found}), flush=True)


def _print_tables(jobs: list[tuple[str, int, list[Row]]], *, clear: bool) -> None:
    text = "\n".join(format_job(*job) for job in jobs)
    if clear:
        width = shutil.get_terminal_size().columns
        text = _CLEAR + "".join(f"{line[:width]}\n" for line in text.splitlines())
    print(text, end="", flush=True)


def _watch(watch: Watch, interval: float, *, once: bool, as_json: bool) -> None:
    while True:
        jobs = watch.look()
        if as_json:
            _print_json(jobs)
        else:
            _print_tables(jobs, clear=sys.stdout.isatty() and not once)
        if once or all(_has_gone(row) for _, _, rows in jobs for row in rows):
            return
        time.sleep(interval)


def _has_gone(row: Row) -> bool:
    return bool(row.state) and row.state != "is stopped"


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.top",
        description="Show what a job of this user does right now: a line a rank, renewed until all "
        "of them have ended or Ctrl-C. Ranks of other machines are not seen.",
        epilog="Shares and bandwidths are of the time since the table before, at first since the "
        "training began. exposed: the training thread waited for communication, on GPUs for "
        "launches alone. idle: the compute stream stood still for communication, on GPUs with "
        "time_waits=True or in traces. Bandwidths are of a lane while it moves something; lanes "
        "and their tasks are up to a quarter of a second old.",
    )
    parser.add_argument(
        "target", nargs="?", metavar="PID|JOB", help="default: the only job, or a list of all"
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="print an object a line instead")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two tables (2)"
    )
    given = parser.parse_args(arguments)
    if given.interval <= 0:
        parser.error("--interval: give a number of seconds above 0")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its status: 1 where there is no such job."""
    given = _arguments(arguments)
    ranks = find_ranks()
    chosen = ranks if given.target is None else choose(ranks, given.target)
    if not chosen:
        named = "" if given.target is None else f" with the name or process {given.target}"
        print(f"no job of this user runs on this machine{named}", file=sys.stderr)
        return 1
    if given.target is None and len({one.job for one in chosen}) > 1 and not given.json:
        print(format_jobs(chosen), end="")
        return 0
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _watch(Watch(chosen), given.interval, once=given.once, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
