"""What a report suggests to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock._trace_files import printable

_ENOUGH = 0.05  # of the time: less exposed communication is not worth a hint
_OPTIONS = {
    "gather": "give penstock.shard memory='auto', which has groups stay gathered and gathers begin "
    "earlier as far as memory goes, or gather fewer bytes by param_dtype=",
    "reduce": "lower bucket_bytes= of penstock.shard, so that the last bucket is smaller, or "
    "reduce fewer bytes by reduce_dtype=",
}
_MEMORY = (
    "memory had no room to gather earlier what is waited for: raise prefetch_bytes= of "
    "penstock.shard, or leave it out and bound what is gathered ahead by memory="
)
_WAKING = (
    "what was waited for had ended, but the thread did not run: give each rank as many CPUs as "
    "it has threads that work"
)
_OF_CAUSES = {"waking": _WAKING, "memory_full": _MEMORY}


def hints_of(result: dict[str, Any]) -> list[str]:
    """Name what may help against the largest cause of exposed communication, by kinds.

    Parameters
    ----------
    result : dict
        The rest of a report.
    """
    return [hint for kind in _OPTIONS for hint in _hints_of_kind(kind, result)]


def _hints_of_kind(kind: str, result: dict[str, Any]) -> Iterator[str]:
    ranks = result["ranks"].values()
    span = sum(row["span_us"] for row in ranks)
    exposed = sum(row[f"exposed_{kind}_us"] for row in ranks)
    if span == 0 or exposed / span < _ENOUGH:
        return
    told = f"compute waits for the lane {kind} in {exposed / span:.1%} of the time"
    cause = _largest_cause(kind, result["exposed"]["groups"])
    if cause == "late_rank":
        yield f"{told}, which mostly waits for {_late_rank(result)}"
    else:
        yield f"{told}: {_OF_CAUSES.get(cause, _OPTIONS[kind])}"


def _largest_cause(kind: str, groups: list[dict[str, Any]]) -> str:
    sums: dict[str, float] = defaultdict(float)
    for row in groups:
        for cause, us in row["causes"].items():
            sums[cause] += us if row["kind"] == kind else 0.0
    return max(sums, key=lambda cause: sums[cause], default="unknown")


def _late_rank(result: dict[str, Any]) -> str:
    late = result["exposed"]["late"]
    rank = max(late, key=lambda rank: late[rank])
    others = [us for other, us in late.items() if other != rank]
    if late[rank] < 2 * statistics.fmean(others):
        return "ranks that come last by turns: look for what delays each (data, other processes)"
    parts = (
        part["name"]
        for part in result["critical_path"]["parts"]
        if (part["kind"], part["rank"]) == ("compute", rank)
    )
    what = next(parts, None)
    most = f", most of all {printable(what)}" if what else ""
    return f"rank {rank}: look at what it computes before{most}, at its data and its machine"
