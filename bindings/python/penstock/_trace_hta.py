"""Traces in the words of Holistic Trace Analysis, which knows files of torch's profiler on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from penstock._trace_files import Event, PathLike, Slice, Track, load_own, write
from penstock._trace_kinds import kind_of
from penstock._trace_links import Rank, Task, compute_of
from penstock._trace_steps import steps_of

_COMPUTE_STREAM = 7
# It tells kinds of kernels by their names; stragglers are found by those that begin so.
_NAMES = {
    "gather": "ncclKernel_AllGather {}",
    "reduce": "ncclKernel_ReduceScatter {}",
    "copy": "Memcpy {}",
    "offload": "Memcpy {}",
}


def write_hta(path: PathLike, folder: PathLike) -> list[str]:
    """Write a trace as a folder of files that Holistic Trace Analysis reads, one a rank.

    Tasks of lanes become kernels of streams: gathers and reductions those of communication, copies
    those of memory. What compute does between its waits becomes kernels of a stream of its own.
    Steps are numbered from 1, as no step 0 is looked at there.

    Parameters
    ----------
    path
        A trace of one rank or a merged one, which has all ranks in one time.
    folder
        Where to, made if it is not there.

    Returns
    -------
    list of str
        The files.

    Raises
    ------
    TraceError
        The file is no trace.
    OSError
        A file cannot be read or written.
    """
    trace = load_own(path)
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for number in trace.ranks:
        out = Path(folder, f"rank{number}.json")
        info = {"backend": "penstock", "rank": number, "world_size": len(trace.ranks)}
        fields = {"schemaVersion": 1, "distributedInfo": info, "displayTimeUnit": "ms"}
        write(out, fields, _events(number, trace.of_rank(number)))
        files.append(str(out))
    return files


def _events(number: int, tracks: list[Track]) -> Iterator[Event]:
    steps = steps_of(tracks)
    for step, one in enumerate(steps, start=1):
        named = Slice(f"ProfilerStep#{step}", one.begin, one.end, {})
        yield _event(number, 0, "user_annotation", named)
    rank = Rank(number, tracks)
    correlations = count(1)
    for one in compute_of(rank, steps):
        yield from _kernel(number, _COMPUTE_STREAM, one, next(correlations))
    streams: dict[str, int] = {}
    for task in rank.tasks:
        stream = streams.setdefault(task.lane, _COMPUTE_STREAM + 1 + len(streams))
        yield from _kernel(number, stream, _named(task), next(correlations))


def _named(task: Task) -> Slice:
    name = _NAMES.get(kind_of(task.one.name, task.lane), "{}").format(task.one.name)
    return Slice(name, task.one.begin, task.one.end, {})


def _kernel(rank: int, stream: int, one: Slice, correlation: int) -> Iterator[Event]:
    """Yield what launches it, by which its step is found, and the kernel."""
    launch = Slice("cudaLaunchKernel", one.begin, one.begin, {"correlation": correlation})
    yield _event(rank, 0, "cuda_runtime", launch)
    args = {"correlation": correlation, "stream": stream, "device": rank}
    yield _event(rank, stream, "kernel", Slice(one.name, one.begin, one.end, args))


def _event(rank: int, tid: int, category: str, one: Slice) -> Event:
    event = {"ph": "X", "cat": category, "name": one.name, "pid": rank, "tid": tid}
    return event | {"ts": round(one.begin, 3), "dur": round(one.duration, 3), "args": one.args}
