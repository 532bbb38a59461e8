"""How ranks come to their collectives: who waits for whom, and for how long data then moves."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from penstock._trace_files import Slice, Track

Collective = dict[int, Slice]  # by rank


def arrivals_of(ranks: dict[int, list[Track]]) -> dict[str, Any]:
    """Divide the collectives that all ranks have in common.

    Parameters
    ----------
    ranks : dict
        Each rank's tracks, in one time.

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
    for lane, collective in _collectives(ranks):
        begins = sorted((one.begin, rank) for rank, one in collective.items())
        (before, _), (last, rank) = begins[-2:]
        behind[rank].append(last - before)
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


def _collectives(ranks: dict[int, list[Track]]) -> Iterator[tuple[str, Collective]]:
    """Find those that all ranks have, with their lanes."""
    found: dict[tuple[str, str, int], list[tuple[int, Slice]]] = defaultdict(list)
    for rank, tracks in ranks.items():
        for track in tracks:
            for one in track.slices:
                if track.is_lane and "ticket" in one.args:
                    found[track.name, one.name, one.args["ticket"]].append((rank, one))
    for (lane, _, _), slices in found.items():
        for collective in _occurrences(slices):
            if len(collective) == len(ranks) > 1:
                yield lane, collective


def _occurrences(slices: Iterable[tuple[int, Slice]]) -> Iterator[Collective]:
    """Tell launches of a replayed ticket apart: each ends on all ranks together."""
    present: Collective = {}
    for rank, one in sorted(slices, key=lambda item: item[1].end):
        if rank in present:
            yield present
            present = {}
        present[rank] = one
    yield present
