"""A rank's beat: once a second it posts where it is, for the others to read if it comes no more.

What a rank has posted stays when it is stopped or killed. A beat that does not change any more
tells that from a rank that is alive and elsewhere. After each one the roll may look at the others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock._errors import PenstockError

INTERVAL = 1.0  # seconds
_PATIENCE = 2.0  # seconds for the store to answer, when it ends
_Where = Callable[[], tuple[int, str]]


@dataclass(frozen=True)
class Posted:
    """What a rank has posted last.

    Attributes
    ----------
    beat : int
        How often it had posted before.
    place : str
        Where it was.
    seconds : float
        Since when, to a beat.
    """

    beat: int
    place: str
    seconds: float


class Beat:
    """The thread that posts, until it is stopped or who is asked is gone.

    Parameters
    ----------
    store : Store
        Where to.
    rank : int
        This rank.
    where : callable
        Returns who is to be asked, if it is still there: that returns how many places this rank has
        been at, and which one it is at.
    look : callable
        Returns what is called after each beat, if it is still there.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        where: Callable[[], _Where | None],
        look: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._over = threading.Event()
        arguments = (store, _key(rank), where, look, self._over)
        self._thread = threading.Thread(target=_post_often, args=arguments, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            text = f"the thread that posts where this rank is could not be started: {error}"
            raise PenstockError("ESYSTEM", text) from None

    def stop(self) -> None:
        """End the thread; one that the store does not answer is left behind."""
        self._over.set()
        self._thread.join(_PATIENCE)


def read(store: Any, rank: int) -> Posted | None:
    """Return what a rank has posted last, if anything."""
    key = _key(rank)
    return Posted(*json.loads(store.get(key))) if store.check([key]) else None


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _post_often(
    store: Any,
    key: str,
    where: Callable[[], _Where | None],
    look: Callable[[], Callable[[], None] | None],
    over: threading.Event,
) -> None:
    beat, known, since = 0, -1, 0.0
    with suppress(RuntimeError, OSError):  # nobody to post to
        while not over.is_set():
            ask = where()
            if ask is None:
                return
            count, place = ask()
            del ask  # who is asked may be collected meanwhile
            now = time.monotonic()
            if count != known:
                known, since = count, now
            store.set(key, json.dumps([beat, place, now - since]))
            beat += 1
            call = look()
            if call is not None:
                call()
            del call
            over.wait(INTERVAL)
