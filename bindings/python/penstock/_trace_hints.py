"""What a report suggests to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ENOUGH = 0.05  # of the time: less exposed communication is not worth a hint
_OPTIONS = {
    "gather": "give penstock.shard memory='auto', which has groups stay gathered and gathers begin "
    "earlier as far as memory goes, or gather fewer bytes by param_dtype=",
    "reduce": "lower bucket_bytes= of penstock.shard, so that the last bucket is smaller, or "
    "reduce fewer bytes by reduce_dtype=",
}


def hints_of(result: dict[str, Any]) -> list[str]:
    """Name the option that may help against each cause of exposed communication.

    Parameters
    ----------
    result : dict
        The rest of a report.
    """
    return [hint for lane in _OPTIONS for hint in _hints_of_lane(lane, result)]


def _hints_of_lane(lane: str, result: dict[str, Any]) -> Iterator[str]:
    ranks = result["ranks"].values()
    span = sum(row["span_us"] for row in ranks)
    exposed = sum(row[f"exposed_{lane}_us"] for row in ranks)
    if span == 0 or exposed / span < _ENOUGH:
        return
    cause = f"compute waits for the lane {lane} in {exposed / span:.1%} of the time"
    arrivals = result["arrivals"]["lanes"].get(lane)
    if arrivals is not None and arrivals["waiting_us"] > arrivals["moving_us"]:
        yield f"{cause}, which mostly waits for {_last_rank(result['arrivals']['last'])}"
    else:
        yield f"{cause}: {_OPTIONS[lane]}"


def _last_rank(last: dict[int, dict[str, float]]) -> str:
    counts = {rank: row["count"] for rank, row in last.items()}
    rank = max(counts, key=lambda rank: counts[rank])
    if counts[rank] < 1.5 * sum(counts.values()) / len(counts):
        return "ranks that come last by turns: look for what delays each (data, other processes)"
    return f"rank {rank}: look at what it computes before, at its data and its machine"
