"""Who is missing: what the dumps of a job's ranks say together.

A rank is to blame if it has failed by itself, if it left no dump, or if others wait for a
collective that it has not come to. Where ranks came to different collectives under one ticket,
those that are fewer are named, and where neither are fewer, nobody is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock._trace_files import MOST, PathLike, Trace, TraceError, load, printable

_OTHERS_FAULT = frozenset({"EPEER", "ETIMEDOUT", "ECANCELED"})  # statuses that accuse nobody here
_MOST_RANKS = 2**20
_SOON_NS = 1_000_000_000  # who is not there within that is late
_CLOSED = ", a gate that is not open"  # how the library ends its text of such a cause

Came = tuple[str, int]  # lane, ticket


@dataclass
class Dump:
    """What one rank has written.

    Attributes
    ----------
    rank, size : int
        Its rank, and of how many.
    head : dict
        The object ``dump`` of the file.
    arrived : dict
        When the rank came to collectives of its record, in nanoseconds of CLOCK_REALTIME.
    """

    path: str
    rank: int
    size: int
    head: dict[str, Any]
    arrived: dict[Came, int]

    @property
    def name(self) -> str:
        """Of the engine, the same in all its dumps."""
        return self.head["name"]

    @property
    def has_failed(self) -> bool:
        """Whether by itself, and not because of another rank."""
        if self.head["cause"] == "signal":
            return self.head["reason"] == "SIGABRT"
        return self.head["cause"] == "failure" and self.head["status"] not in _OTHERS_FAULT

    def place(self, rank: int) -> tuple[str, float] | None:
        """Return where a rank was, and for how many seconds (-1: not known); None: not known."""
        for place in self.head["places"]:
            if place["rank"] == rank:
                return place["place"], _seconds(place)
        return None

    def came(self) -> dict[Came, set[str]]:
        """Return the collectives that the rank came to last: what their tasks are called."""
        names: defaultdict[Came, set[str]] = defaultdict(set)
        for part in [*self.head["launches"], *self._open_tasks()]:
            if part["ticket"]:
                names[part["lane"], part["ticket"]].add(part["task"])
        return names

    @cached_property
    def last(self) -> dict[str, int]:
        """The last ticket that the rank came to on each lane."""
        last: dict[str, int] = {}
        for lane, ticket in [*self.came(), *self.arrived]:
            last[lane] = max(ticket, last.get(lane, 0))
        return last

    def waited(self) -> list[dict[str, Any]]:
        """Return the collectives that the rank has come to, or waits for, and that have not ended.

        The first one first: it is what holds the others up.
        """
        waits = [part for part in self.head["waits"] if part["ticket"]]
        open_parts = {
            (part["lane"], part["ticket"]): part for part in [*self._open_tasks(), *waits]
        }
        return sorted(open_parts.values(), key=lambda part: part["ticket"])

    def _open_tasks(self) -> list[dict[str, Any]]:
        tasks = self.head["tasks"]
        return [part for part in tasks if part["ticket"] and part["state"] == "launched"]


@dataclass
class Blamed:
    """A rank that is to blame.

    Attributes
    ----------
    rank : int
        Which one.
    why : str
        What it has or has not done.
    place : str
        Where it was; empty: not known.
    seconds : float
        For how long; -1: not known.
    ticket : int
        Of the collective that others wait for; 0: none is known.
    """

    rank: int
    why: str
    place: str = ""
    seconds: float = -1.0
    ticket: int = 0


@dataclass
class Hang:
    """What is known of one engine."""

    name: str
    size: int
    dumps: dict[int, Dump]
    blamed: list[Blamed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def silent(self) -> list[int]:
        """The ranks that left no dump."""
        return [rank for rank in range(self.size) if rank not in self.dumps]

    def as_dict(self) -> dict[str, Any]:
        """Return what is known as JSON has it."""
        return {
            "name": self.name,
            "size": self.size,
            "silent": self.silent,
            "blamed": [asdict(blamed) for blamed in self.blamed],
            "notes": self.notes,
            "ranks": {rank: dump.head for rank, dump in sorted(self.dumps.items())},
        }


# ---- reading ------------------------------------------------------------------------------------

_TEXTS = ("name", "host", "cause", "status", "reason")
_LISTS: dict[str, dict[str, type]] = {
    "places": {"rank": int, "place": str},
    "waits": {"task": str, "lane": str, "graph": str, "ticket": int, "for": str},
    "tasks": {"task": str, "lane": str, "graph": str, "ticket": int, "state": str},
    "gates": {"gate": str, "graph": str},
    "launches": {"task": str, "lane": str, "ticket": int},
}


def read(folder: PathLike) -> list[Hang]:
    """Read the dumps of a folder, and find who is to blame.

    Returns
    -------
    list of Hang
        One an engine, that of the newest dump first.

    Raises
    ------
    TraceError
        There are none, or one is damaged.
    """
    found = sorted(Path(folder).glob("*-rank*.json"))
    dumps = [dump for path in found if (dump := _dump_of(load(path))) is not None]
    if not dumps:
        raise TraceError(
            f"{folder}: no dumps (NAME-rankN.json) there: give the folder that PENSTOCK_DUMP named"
        )
    engines: defaultdict[str, list[Dump]] = defaultdict(list)
    for dump in sorted(dumps, key=lambda dump: -dump.head["written"]):
        engines[dump.name].append(dump)
    return [_hang_of(name, own) for name, own in engines.items()]


def _dump_of(trace: Trace) -> Dump | None:
    """Return what a file holds, checked; None: it is a trace and no dump."""
    head = trace.fields.get("penstock", {}).get("dump")
    if head is None:
        return None
    info = trace.fields.get("distributedInfo", {})
    rank, size = info.get("rank"), info.get("world_size")
    if not (type(rank) is int and type(size) is int and 0 <= rank < size <= _MOST_RANKS):
        raise TraceError(f"{trace.path}: its rank is {rank!r:.40} of {size!r:.40}")
    _check(trace.path, head)
    dump = Dump(trace.path, rank, size, head, {})
    for track in trace.tracks.values():
        for part in track.slices if track.is_lane else ():
            came = track.name, part.args.get("ticket", 0)
            dump.arrived[came] = trace.base_ns + int(part.begin * 1000)
    for task in head["tasks"]:
        if "age_ns" in task:
            dump.arrived[task["lane"], task["ticket"]] = head["written"] - task["age_ns"]
    return dump


def _check(path: str, head: Any) -> None:
    """Raise unless all that is read later is what it should be."""
    lists = [head.get(name) for name in _LISTS] if type(head) is dict else [None]
    is_whole = (
        all(type(parts) is list for parts in lists)
        and all(type(head.get(name)) is str for name in _TEXTS)
        and _is_count(head.get("written"), most=2**63)
        and _is_count(head.get("pid"))
    )
    if not is_whole:
        raise TraceError(f"{path}: its dump is damaged: something is missing in its head")
    for name, known in _LISTS.items():
        for part in head[name]:
            if not (type(part) is dict and _fits(part, known)):
                raise TraceError(f"{path}: its dump is damaged: {name} has {part!r:.60}")


def _fits(part: dict[str, Any], known: dict[str, type]) -> bool:
    has_all = all(type(part.get(key)) is kind for key, kind in known.items())
    numbers = [value for key, value in part.items() if key == "age_ns" or known.get(key) is int]
    return has_all and all(_is_count(number, most=2**63) for number in numbers)


def _is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 <= value <= most


def _seconds(part: dict[str, Any]) -> float:
    return part["age_ns"] / 1e9 if "age_ns" in part else -1.0


# ---- who is to blame ----------------------------------------------------------------------------


def _hang_of(name: str, dumps: list[Dump]) -> Hang:
    hang = Hang(name, max(dump.size for dump in dumps), {dump.rank: dump for dump in dumps})
    _compare(hang)
    for dump in dumps:
        if dump.has_failed and not hang.notes:
            hang.blamed.append(_blame(hang, dump.rank, f"failed: {dump.head['reason']}"))
    for rank in hang.silent:
        hang.blamed.append(_blame(hang, rank, "left no dump"))
    if not hang.blamed and not hang.notes:
        _find_late(hang)
    if not hang.blamed and not hang.notes:
        _find_closed(hang)
    return hang


def _blame(hang: Hang, rank: int, why: str, ticket: int = 0, by: Dump | None = None) -> Blamed:
    """Say where a rank was, as `by` has seen it, it says itself, or all others have seen it."""
    own = hang.dumps.get(rank)
    witness = by if by is not None and by.place(rank) is not None else own
    witnesses = [witness] if witness is not None else hang.dumps.values()
    seen = [found for dump in witnesses if (found := dump.place(rank)) is not None]
    place, seconds = max(seen, key=lambda found: found[1], default=("", -1.0))
    return Blamed(rank, why, place, seconds, ticket or (_awaited(hang) if not own else 0))


def _awaited(hang: Hang) -> int:
    """Return the first ticket that ranks wait at."""
    first = [dump.waited()[0]["ticket"] for dump in hang.dumps.values() if dump.waited()]
    return min(first, default=0)


def _compare(hang: Hang) -> None:
    """Find the first ticket under which ranks came to different collectives."""
    names: defaultdict[Came, dict[int, set[str]]] = defaultdict(dict)
    for rank, dump in sorted(hang.dumps.items()):
        for came, tasks in dump.came().items():
            names[came][rank] = tasks
    different = [came for came, by_rank in names.items() if not set.intersection(*by_rank.values())]
    if not different:
        return
    lane, ticket = min(different, key=lambda came: came[1])
    ways: defaultdict[str, list[int]] = defaultdict(list)
    for rank, tasks in names[lane, ticket].items():
        ways[" and ".join(map(repr, sorted(tasks)))].append(rank)
    told = ", ".join(f"{_ranks(ranks)} {way}" for way, ranks in ways.items())
    hang.notes.append(
        f"the ranks did different things: under ticket {ticket} of lane {lane} came {told}"
    )
    most = max(map(len, ways.values()))
    for way, ranks in ways.items():
        if 2 * most > len(names[lane, ticket]) and len(ranks) < most:
            why = f"came to {way} where most others came to something else"
            hang.blamed += [_blame(hang, rank, why, ticket) for rank in ranks]


def _find_late(hang: Hang) -> None:
    """Blame those that had not come to where another rank waited, when that wrote its dump."""
    awaited: dict[Came, tuple[Dump, dict[str, Any]]] = {}  # who gave up first
    for dump in sorted(hang.dumps.values(), key=lambda dump: dump.head["written"]):
        for part in dump.waited():
            awaited.setdefault((part["lane"], part["ticket"]), (dump, part))
    for rank, dump in sorted(hang.dumps.items()):
        missed = [
            (part["ticket"], f"{how} {_collective(part)}{_closed(dump, part)}", other.rank)
            for other, part in awaited.values()
            if other is not dump and (how := _missed(dump, other, part))
        ]
        if missed:
            ticket, why, witness = min(missed)
            hang.blamed.append(_blame(hang, rank, why, ticket, hang.dumps[witness]))


def _closed(dump: Dump, awaited: dict[str, Any]) -> str:
    """Say that a rank has not opened the gate of what another one waits for, where it has not."""
    gates = [(gate["gate"], gate["graph"]) for gate in dump.head["gates"]]
    is_closed = (awaited["task"], awaited["graph"]) in gates
    return ", whose gate it has not opened" if is_closed else ""


def _missed(dump: Dump, other: Dump, awaited: dict[str, Any]) -> str:
    """Say how a rank has missed what another one waited for; empty: it has not."""
    age = awaited.get("age_ns", other.head["written"])
    has_waited = dump.head["written"] - (other.head["written"] - age) > _SOON_NS
    if dump.last.get(awaited["lane"], 0) < awaited["ticket"] and has_waited:
        return "did not come to"
    came = dump.arrived.get((awaited["lane"], awaited["ticket"]), 0)
    late = (came - other.head["written"]) / 1e9
    is_late = other.head["cause"] == "deadline" and late > 0
    return f"came, {late:.1f} s after rank {other.rank} had given up, to" if is_late else ""


def _find_closed(hang: Hang) -> None:
    """Note who waits for a gate that it has to open itself."""
    for rank, dump in sorted(hang.dumps.items()):
        for wait in dump.head["waits"]:
            if wait["for"].endswith(_CLOSED):
                gate = wait["for"].removesuffix(_CLOSED).partition(" (")[0]
                hang.notes.append(
                    f"missing: nobody on rank {rank} has opened the gate {gate!r} of graph "
                    f"{wait['graph']!r}"
                )


# ---- in words -----------------------------------------------------------------------------------


def format_hang(hang: Hang) -> str:
    """Return what is known of an engine in lines, those to blame first."""
    lines = [f"{hang.name}: {len(hang.dumps)} of {hang.size} ranks left a dump"]
    lines += [_format_blamed(hang, blamed) for blamed in hang.blamed]
    lines += hang.notes
    if not hang.blamed and not hang.notes:
        lines.append("no rank is missing, none has failed by itself")
    lines += [_format_rank(hang.dumps[rank]) for rank in sorted(hang.dumps)]
    return "".join(f"{printable(line)}\n" for line in lines)


def _format_blamed(hang: Hang, blamed: Blamed) -> str:
    text = f"missing: rank {blamed.rank} {blamed.why}"
    if blamed.ticket and f"ticket {blamed.ticket}" not in text:
        text += f"; others wait at ticket {blamed.ticket}"
    if blamed.place:
        place, _, process = blamed.place.partition("; ")
        since = f" since {blamed.seconds:.1f} s" if blamed.seconds >= 0 else ""
        text += f"; {place}{since}{process and ', '}{process}"
    elif blamed.rank in hang.silent:
        text += "; where it was is not known to the others"
    return text


def _format_rank(dump: Dump) -> str:
    head, place = dump.head, dump.place(dump.rank)
    text = f"rank {dump.rank} ({head['host']}, process {head['pid']})"
    if place is not None:
        text += f" {place[0]}"
    for wait in head["waits"]:
        text += f"; waits {_seconds(wait):.1f} s for {_collective(wait)}"
        is_itself = wait["for"].startswith("itself")
        text += f", and that for {wait['for']}" if wait["for"] and not is_itself else ""
    for part in dump.waited() if not head["waits"] else ():
        text += f"; {_collective(part)} has not ended"
    return f"{text}; {head['cause']}: {head['reason'] or head['status']}"


def _collective(part: dict[str, Any]) -> str:
    what = repr(part["task"]) if part["task"] else f"all of graph {part['graph']!r}"
    lane = f"lane {part['lane']}" if part["lane"] else ""
    ticket = f"ticket {part['ticket']}" if part["ticket"] else ""
    inside = ", ".join(filter(None, (ticket, lane)))
    return f"{what} ({inside})" if inside else what


def _ranks(ranks: Iterable[int]) -> str:
    named = list(map(str, ranks))
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"
