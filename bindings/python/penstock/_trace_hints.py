"""What a report suggests to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock._trace_files import printable
from penstock._trace_text import part_name

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
_ALONE = (
    "; but first merge the other ranks' traces into it by python -m penstock.trace merge: this one "
    "does not tell whether they came late"
)
_OF_CAUSES = {"waking": _WAKING, "memory_full": _MEMORY}
_FEW = 4  # steps, of which none is told to be unusual
_MOST = 3  # unusual steps that are named
_LONGER = {
    "compute": "compute took {} longer",
    "moving": "data moved for {} longer, as with other traffic on the link",
    "launching": "collectives were launched {} later",
    "waking": "threads woke {} later, as where they have too few CPUs",
    "unknown wait": "what the trace does not have took {} longer",
}


def hints_of(result: dict[str, Any]) -> list[str]:
    """Name the steps that took unusually long, and what may help against exposed communication.

    Parameters
    ----------
    result : dict
        The rest of a report.
    """
    hints = [hint for kind in _OPTIONS for hint in _hints_of_kind(kind, result)]
    return [*_unusual_steps(result["steps"]), *hints]


# ---- unusual steps ------------------------------------------------------------------------------


def _unusual_steps(steps: list[dict[str, Any]]) -> Iterator[str]:
    """Say what took longer in steps that are out of line than it does in others."""
    lengths = [step["critical_path"]["length_us"] for step in steps]
    if len(steps) < _FEW:
        return
    usual = statistics.median(lengths)
    spread = statistics.median(abs(length - usual) for length in lengths)
    least = usual + max(usual / 4, 2 * spread)
    paths = [_by_kinds(step) for step in steps]
    for length, step, own in sorted(zip(lengths, steps, paths, strict=True), key=_length)[:_MOST]:
        if length > least:
            why = _excess(own, [path for path in paths if path is not own])
            yield f"step {step['step']} took {_ms(length)}, where {_ms(usual)} is the median: {why}"


def _length(found: tuple[float, Any, Any]) -> float:
    return -found[0]


def _by_kinds(step: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Add up the parts of a step's critical path: by kinds, and within these by names."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in step["critical_path"]["parts"]:
        sums[part["kind"]][part_name(part)] += part["us"]
    return sums


def _excess(own: dict[str, dict[str, float]], others: list[dict[str, dict[str, float]]]) -> str:
    """Name the kind that took longer than in the other steps, and of that the part that did."""

    def more(kind: str) -> float:
        usual = statistics.median(sum(path.get(kind, {}).values()) for path in others)
        return sum(own[kind].values()) - usual

    def more_of(name: str) -> float:
        return own[kind][name] - statistics.median(
            path.get(kind, {}).get(name, 0.0) for path in others
        )

    kind = max(own, key=more)
    name = max(own[kind], key=more_of)
    return f"{_LONGER[kind].format(_ms(more(kind)))}, most of all {name}, {_ms(more_of(name))}"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms"


# ---- exposed communication ----------------------------------------------------------------------


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
        alone = _ALONE if len(ranks) < result["world_size"] else ""
        yield f"{told}: {_OF_CAUSES.get(cause, _OPTIONS[kind] + alone)}"


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
