"""Files for Chakra: what each rank did and behind what, for simulators of other machines."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock._trace_files import PathLike, Slice, Trace, TraceError, load_own
from penstock._trace_links import Rank, Task, compute_of
from penstock._trace_steps import steps_of

_VERSION = "0.0.4"
_COMPUTE, _COLLECTIVE = 4, 7  # kinds of nodes
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER = 0, 2, 7  # kinds of collectives
_SMALL = ("presence", "question")  # all-reduces: what ranks ask each other
_REPLICAS = "reduce replicas"  # the lane


def write_chakra(path: PathLike, folder: PathLike) -> list[str]:
    """Write a trace as a folder of Chakra's execution traces, ``rank.N.et`` for rank N.

    Nodes are what compute does between its waits, and collectives. Compute depends on the compute
    before it, on the collectives for which it waited, on gathers of what it uses by its name, and
    an optimizer on gradients; a collective on the one before it on its lane and on the compute that
    had ended when it began. Copies are left out.

    Parameters
    ----------
    path
        A trace of one rank or a merged one, of models sharded without replicas.
    folder
        Where to, made if it is not there.

    Returns
    -------
    list of str
        The files.

    Raises
    ------
    TraceError
        The file is no trace, has no steps, or lanes of replicas.
    OSError
        A file cannot be read or written.
    """
    trace = load_own(path)
    world = trace.fields.get("distributedInfo", {}).get("world_size", len(trace.ranks))
    ranks = {number: _checked(trace, number) for number in trace.ranks}
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for number, (rank, steps) in ranks.items():
        out = Path(folder, f"rank.{number}.et")
        messages = [_metadata(), *(node.encoded() for node in _nodes(rank, steps, world))]
        out.write_bytes(b"".join(_varint(len(one)) + one for one in messages))
        files.append(str(out))
    return files


def _checked(trace: Trace, number: int) -> tuple[Rank, list[Slice]]:
    """Return what a rank has, and its steps, or say why kinds and sizes are not known."""
    tracks = trace.of_rank(number)
    rank, steps = Rank(number, tracks), steps_of(tracks)
    if not steps:
        raise TraceError(
            f"{trace.path}: rank {number} has no steps: trace a training of penstock's"
        )
    if any(track.is_lane and track.name == _REPLICAS for track in tracks):
        raise TraceError(f"{trace.path}: a trace of replicas does not tell who takes part in what")
    return rank, steps


# ---- nodes --------------------------------------------------------------------------------------


@dataclass
class _Node:
    number: int
    one: Slice
    after: list[int]  # numbers of nodes before it
    collective: tuple[int, int] | None = None  # its kind, and what each rank gives, in bytes

    def encoded(self) -> bytes:
        kind = _COMPUTE if self.collective is None else _COLLECTIVE
        deps = b"".join(map(_varint, self.after))
        attributes = [_text(1, "is_cpu_op") + _number(27, 0)]
        if self.collective is not None:
            named = zip(("comm_type", "comm_size"), self.collective, strict=True)
            attributes += [_text(1, name) + _number(9, value) for name, value in named]
        begin, end = (max(round(time), 0) for time in (self.one.begin, self.one.end))
        return b"".join(
            (
                _number(1, self.number),
                _text(2, self.one.name),
                _number(3, kind),
                _bytes(5, deps),
                _number(6, begin),
                _number(7, end - begin),
                *(_bytes(10, attribute) for attribute in attributes),
            )
        )


def _nodes(rank: Rank, steps: list[Slice], world: int) -> Iterator[_Node]:
    """Yield a rank's nodes by their begin, so that each comes behind all that it depends on."""
    found: list[Slice | Task] = [*compute_of(rank, steps), *_collectives(rank)]
    numbers: dict[int, int] = {}  # of tasks that were passed, by their ids
    ends: list[tuple[float, int]] = []  # of compute that was passed, with its numbers
    last, since = 0, -math.inf  # the last of that, and its begin
    latest: dict[str, int] = {}  # collectives that were passed, by name
    for number, one in enumerate(sorted(found, key=_begin), start=1):
        if isinstance(one, Task):
            at = bisect.bisect(ends, one.one.begin, key=lambda end: end[0])
            after = {numbers.get(id(one.before), 0), ends[at - 1][1] if at else 0}
            numbers[id(one)] = latest[one.one.name] = number
            yield _Node(number, one.one, sorted(after - {0}), _kind(one, world))
        else:
            waits = rank.waits_between(since, one.begin)
            after = {last} | {numbers.get(id(wait.task), 0) for wait in waits} | _uses(one, latest)
            last, since = number, one.begin
            ends.append((one.end, number))
            yield _Node(number, one, sorted(after - {0}))


def _uses(one: Slice, latest: dict[str, int]) -> set[int]:
    """Return what compute needs by its name: threads tell no wait for what is there already."""
    kind, _, unit = one.name.partition(" ")
    if kind == "optimizer":
        gradients = [number for name, number in latest.items() if name.startswith("gradients")]
        return {max(gradients, default=0)}
    if kind not in ("forward", "backward", "recompute"):
        return set()
    unit = unit or "root"
    return {n for name, n in latest.items() if name == unit or name.startswith(f"{unit} ")}


def _begin(one: Slice | Task) -> float:
    return one.one.begin if isinstance(one, Task) else one.begin


def _collectives(rank: Rank) -> list[Task]:
    return [task for task in rank.tasks if "ticket" in task.one.args]


def _kind(task: Task, world: int) -> tuple[int, int]:
    size = task.one.args.get("bytes", 0)
    if task.one.name in _SMALL:
        return _ALL_REDUCE, size
    if task.one.name.startswith("gradients"):
        return _REDUCE_SCATTER, size
    return _ALL_GATHER, size // world


# ---- protocol buffers ---------------------------------------------------------------------------


def _metadata() -> bytes:
    return _text(1, _VERSION)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())
