"""How ranks come to their collectives: who waits for whom, and for how long data then moves."""

from __future__ import annotations

import statistics
from typing import Any

from penstock._trace_files import Interval
from penstock._trace_links import Rank, Task, collectives_of


def arrivals_of(ranks: dict[int, Rank], spans: dict[int, Interval] | None) -> dict[str, Any]:
    """Divide the collectives that all ranks have in common.

    Parameters
    ----------
    ranks : dict
        By rank what it has, in one time.
    spans : dict, optional
        By rank when tasks of collectives have to begin; None: at any time.

    Returns
    -------
    dict
        ``lanes``: for each lane ``count`` of collectives, and of a rank on average ``waiting_us``,
        in which it was there and another rank was not, and ``moving_us`` from when all were there.
        ``last``: for each rank ``count``, how often it came last, and ``behind_us``, the median of
        how long after the rank before it. Both are empty where there is one rank.
    """
    lanes: dict[str, dict[str, float]] = {}
    behind: dict[int, list[float]] = {rank: [] for rank in ranks} if len(ranks) > 1 else {}
    for tasks in collectives_of(ranks):
        if spans is not None and not _is_whole(tasks, spans):
            continue
        collective = {rank: task.one for rank, task in tasks.items()}
        begins = sorted((one.begin, rank) for rank, one in collective.items())
        (before, _), (last, rank) = begins[-2:]
        behind[rank].append(last - before)
        lane = tasks[rank].lane
        row = lanes.setdefault(lane, {"count": 0, "waiting_us": 0.0, "moving_us": 0.0})
        waiting = [min(last, one.end) - one.begin for one in collective.values()]
        moving = [max(one.end - last, 0.0) for one in collective.values()]
        row["count"] += 1
        row["waiting_us"] += statistics.fmean(waiting)
        row["moving_us"] += statistics.fmean(moving)
    last_ones = {
        rank: {"count": len(times), "behind_us": statistics.median(times) if times else 0.0}
        for rank, times in behind.items()
    }
    return {"lanes": lanes, "last": last_ones}


def _is_whole(collective: dict[int, Task], spans: dict[int, Interval]) -> bool:
    """Whether all its tasks began in their ranks' spans."""
    return all(
        rank in spans and spans[rank][0] <= task.one.begin < spans[rank][1]
        for rank, task in collective.items()
    )
