"""Figures of a training step: its floating-point operations, and how long its device is idle."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # what a trace calls the work of a device

Interval = tuple[float, float]  # begin and end in us


def flops_of_token(parameters: int, layers: int, attention_width: int, sequence: int) -> int:
    """Operations of a token's forward and backward: all parameters, and all pairs of tokens."""
    return 6 * parameters + 12 * layers * attention_width * sequence


@dataclass(frozen=True)
class Idle:
    """Shares of the span from the first to the last work, and that span."""

    device: float  # no stream works
    stream: float  # the stream with the most kernel time does not work
    span_ms: float


def idle_of(train: Callable[[], None]) -> Idle:
    """Profile what train issues, which synchronises at its end.

    Replayed graphs may spread their kernels over streams of their own, so that the stream with the
    most kernel time need not be all of the compute: the share of the device is a lower bound.
    """
    record(train)  # the first profile starts the profiler
    return idle_in(record(train))


def record(train: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace of this device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def idle_in(events: list[dict[str, Any]]) -> Idle:
    """Find the idle shares in the events of a Chrome trace."""
    streams: dict[int, list[Interval]] = defaultdict(list)
    kernel_time: dict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") not in WORK:
            continue
        stream = event["args"]["stream"]
        streams[stream].append((event["ts"], event["ts"] + event["dur"]))
        kernel_time[stream] += event["dur"] if event["cat"] == "kernel" else 0
    if not streams:
        raise RuntimeError("a profile shows no work of the device: is another profiler at work?")
    everything = [interval for intervals in streams.values() for interval in intervals]
    span = max(end for _, end in everything) - min(begin for begin, _ in everything)
    busiest = max(kernel_time, key=lambda stream: kernel_time[stream])
    return Idle(
        device=1 - covered(everything) / span,
        stream=1 - covered(streams[busiest]) / span,
        span_ms=span / 1e3,
    )


def covered(intervals: Iterable[Interval]) -> float:
    """Measure the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
