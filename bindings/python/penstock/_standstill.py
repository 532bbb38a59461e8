"""Whether a rank goes on, by its page: of a thread that waits in torch nobody else can tell."""

from __future__ import annotations

import time

from penstock import _C
from penstock._page import Lane, copy_head


class Standstill:
    """Since when nothing moves on this rank: neither its program nor what it has launched.

    Parameters
    ----------
    page : Page
        Of this rank.
    """

    def __init__(self, page: _C.Page) -> None:
        self._page = page
        self._moved: tuple[int, ...] = ()
        self._since = 0.0

    def look(self) -> tuple[float, Lane | None]:
        """Return for how many seconds looks have found nothing moved, and what is unfinished.

        That is the lane whose oldest unfinished task was launched first: one with a ticket, if
        there is one. None: all has ended that was launched.
        """
        head = copy_head(memoryview(self._page))
        lanes = head.lanes[: head.lane_count]
        moved, now = (head.place.count, *(lane.ended for lane in lanes)), time.monotonic()
        if moved != self._moved:
            self._moved, self._since = moved, now
        unfinished = [lane for lane in lanes if lane.since]
        first = min(unfinished, key=lambda lane: (lane.ticket == 0, lane.since), default=None)
        return now - self._since, first
