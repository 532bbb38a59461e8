"""Figures of a training step: its floating-point operations, and how long its device is idle."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # what a trace calls the work of a device

KINDS = {
    "products": r"nvjet|gemm|cutlass|cublas",
    "attention": r"fmha|flash|cudnn",
    "compiled": r"^triton_",
    "nccl": r"ncclDevKernel",
}  # kinds of work by what is in their kernels' names; others stand by their own

BESIDE = r"^pst_|ncclDevKernel|^Mem(cpy|set)"  # what is not the model's own: see Idle

Interval = tuple[float, float]  # begin and end in us


def flops_of_token(parameters: int, layers: int, attention_width: int, sequence: int) -> int:
    """Operations of a token's forward and backward: all parameters, and all pairs of tokens."""
    return 6 * parameters + 12 * layers * attention_width * sequence


@dataclass(frozen=True)
class Idle:
    """Shares of the span from the first to the last work, and that span."""

    device: float  # no stream works
    compute: float  # nothing works but communication, updates by penstock, copies and fills
    span_ms: float


def record(train: Callable[[], None]) -> list[dict[str, Any]]:
    """Profile what train issues, which synchronises at its end: a Chrome trace's events."""
    profiled(train)  # the first profile starts the profiler
    return profiled(train)


def profiled(train: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace of this device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def idle_in(events: list[dict[str, Any]]) -> Idle:
    """Find the idle shares in the events of a Chrome trace.

    Compute is told by the names of its kernels: a replayed graph spreads them over streams.
    """
    everything: list[Interval] = []
    compute: list[Interval] = []
    for event in events:
        if event.get("cat") not in WORK:
            continue
        interval = (event["ts"], event["ts"] + event["dur"])
        everything.append(interval)
        if not re.search(BESIDE, event["name"]):
            compute.append(interval)
    if not everything:
        raise RuntimeError("a profile shows no work of the device: is another profiler at work?")
    span = max(end for _, end in everything) - min(begin for begin, _ in everything)
    return Idle(
        device=1 - covered(everything) / span,
        compute=1 - covered(compute) / span,
        span_ms=span / 1e3,
    )


def work_in(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return ms by kind of work, longest first: all of it, and that beside which nothing worked."""
    work = [event for event in events if event.get("cat") in WORK]
    edges = [(event["ts"], 1, number) for number, event in enumerate(work)]
    edges += [(event["ts"] + event["dur"], 0, number) for number, event in enumerate(work)]
    whole: dict[str, float] = defaultdict(float)
    alone: dict[str, float] = defaultdict(float)
    running: set[int] = set()
    before = 0.0
    for time, begins, number in sorted(edges):
        for one in running:
            whole[kind_of(work[one]["name"])] += (time - before) / 1e3
        if len(running) == 1:
            alone[kind_of(work[next(iter(running))]["name"])] += (time - before) / 1e3
        running.add(number) if begins else running.discard(number)
        before = time
    return {kind: (whole[kind], alone[kind]) for kind in sorted(whole, key=lambda k: -whole[k])}


def kind_of(name: str) -> str:
    """Group what does the same work under one name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name):
            return kind
    return re.sub(r"^void |[<(].*", "", name)


def covered(intervals: Iterable[Interval]) -> float:
    """Measure the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
