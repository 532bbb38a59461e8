"""The roll of an engine's ranks: what they report to each other beside their communicators.

A rank that does not come to a collective cannot say so, and the collective does not know who it is.
So the ranks meet in the store of ``torch.distributed`` when an engine is made; who waits for long
leaves a line there of the tickets it has come to, and who fails, of why; and each has a beat that
posts where it is, and that looks after the others where this rank waits for its GPU within torch,
which calls nobody meanwhile. Whoever gives up reads what the others have left, and asks the system
after those on the same machine.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import mmap
import os
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock import _C, _beat
from penstock._beat import Beat, Posted
from penstock._dump import dump_all, is_wanted
from penstock._errors import PenstockError
from penstock._page import open_page, state_of, text_of
from penstock._standstill import Standstill

Place = tuple[str, str, int]  # lane, task, ticket
Answer = TypeVar("Answer")

_PATIENCE = 2.0  # seconds to wait for the store, and for lines of other ranks
_SILENCE = 2 * _beat.INTERVAL  # without a beat: a rank is not heard of any more
_MOST = 8  # named in one text
_NOT_COMPARED = (
    " (with verify=False that may be because of any rank on another path, this one included: "
    "verify=True tells)"
)
_THEIRS = ("EPEER", "ETIMEDOUT")  # statuses of failures that other ranks have caused
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO)  # by the library's numbers
_logger = logging.getLogger("penstock")
_rolls: weakref.WeakSet[Roll] = weakref.WeakSet()
_numbers = itertools.count()  # of the rolls of this process


class Roll:
    """One engine's ranks.

    Parameters
    ----------
    store : Store, optional
        Of these ranks and for this engine alone; None: this process is the only rank.
    rank, size : int
        This rank, and how many there are.
    timeout : float
        Seconds that an operation among the ranks may take.

    Attributes
    ----------
    rank, size, timeout
        As given.
    hosts : list of str
        An identifier of each rank's machine; empty before the ranks have met.
    page : Page
        What others of its machine see of this rank.
    pages : dict
        Those of the other ranks of this machine that are to be read.
    compares : bool
        Whether the ranks compare their collectives before they begin.
    run : str
        Names this engine among those of all jobs, the same on all ranks once they have met.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.hosts: list[str] = []
        self.rank, self.size, self.timeout = rank, size, timeout
        self.compares = True
        self._others = [other for other in range(size) if other != rank]
        self._store = store
        self._is_mute = store is None  # the store: it has not answered, or there is none
        self._pid = os.getpid()
        self._pids: dict[int, int] = {}  # of the other ranks on this machine
        self.pages: dict[int, mmap.mmap] = {}
        self.page = _C.Page()
        self.run = _digest([self._record(), str(next(_numbers))])
        self._line: Any = None  # what the others can read of this rank
        self._writing = threading.Lock()  # of the line
        self._checking = threading.Lock()  # of what follows, down to `_before`
        self._looked = 0.0  # seconds after the beginning of this wait
        self._is_logged = False  # this wait
        self._seen: _Found | None = None  # some beats before it is
        self._knows = False  # that another rank has failed
        self._place: Place | None = None  # where this rank waits
        self._before: Place | None = None
        self._placed = 0.0  # when that was so last
        self._called = 0.0  # by the engine, which waits: when last
        self._joined = 0  # calls of `together`, which all ranks make alike
        self._standstill = Standstill(self.page)
        self._runtime: Callable[[], _C.Runtime | None] = lambda: None
        self._beat: Beat | None = None
        if not _rolls:
            atexit.unregister(_leave_all)
            atexit.register(_leave_all)  # last, so that it runs before engines are closed
        _rolls.add(self)

    # ---- meeting --------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait until all ranks are here; a signal's handler may end that.

        Raises
        ------
        PenstockError
            ETIMEDOUT, with the ranks that have not come.
        """
        over = threading.Event()
        meeting = _Aside(self._meet, over)
        try:
            meeting.wait(self.timeout)
        finally:
            over.set()
            is_answered = meeting.wait(_PATIENCE)
        why = meeting.result() if is_answered else "the store of torch.distributed does not answer"
        if why:
            raise PenstockError(
                "ETIMEDOUT",
                f"rank {self.rank}: {why} ({self.timeout:g} s): all ranks of the process group "
                "have to call this, in one order",
            )

    def _meet(self, over: threading.Event) -> str:
        """Wait for the others until it is over; say who has not come."""
        self._store.set(f"here/{self.rank}", self._record())
        if self._store.add("come", 1) > len(self._others):
            self._store.set("all", "here")
        pause = 0.001
        while not self._store.check(["all"]):
            if over.wait(pause):
                return self._withdraw()
            pause = min(2 * pause, 0.1)
        ranks = range(self.size)
        records = [self._store.get(f"here/{rank}").decode().split() for rank in ranks]
        gone = [rank for rank in ranks if not records[rank]]
        if gone:
            return f"{_ranks(gone)} had given up"
        self.run = _digest(map(" ".join, records))
        self.hosts = [host for host, *_ in records]
        mine = records[self.rank][:2]
        near = [rank for rank in self._others if records[rank][:2] == mine]
        self._pids = {rank: int(records[rank][2]) for rank in near}
        pages = {rank: open_page(self._pids[rank], int(records[rank][3])) for rank in near}
        self.pages = {rank: page for rank, page in pages.items() if page is not None}
        return ""

    def _record(self) -> str:
        """Return what the others identify this process by."""
        return f"{_this_host()} {_namespace()} {os.getpid()} {self.page.descriptor}"

    def _withdraw(self) -> str:
        """Be ready to come again."""
        self._store.add("come", -1)
        self._store.set(f"here/{self.rank}", "")
        missing = [rank for rank in self._others if not self._store.check([f"here/{rank}"])]
        if missing:
            return f"{_ranks(missing)} did not come in time"
        gone = [rank for rank in self._others if not self._store.get(f"here/{rank}")]
        return f"{_ranks(gone)} had given up" if gone else "a rank came too late"

    def together(self, what: str, function: Callable[[], Answer]) -> Answer:
        """Call what blocks until all ranks are in it; a signal's handler may end that.

        Raises
        ------
        PenstockError
            EPEER, with what has failed, here or on another rank.
        """
        begin = time.monotonic()
        self._joined += 1
        place = ("", what, self._joined)  # as of a lane without a name
        call = _Aside(function)
        while not call.wait(0.1):
            failure = self.waits(time.monotonic() - begin, "", self._joined, [place])
            if failure:
                raise PenstockError("EPEER", f"rank {self.rank}: no {what}: {failure}")
        try:
            return call.result()
        except (RuntimeError, OSError) as error:
            first = next(iter(str(error).splitlines()), "")
            text = f"rank {self.rank}: no {what}: {first}"
            status = "ETIMEDOUT" if "imeout" in first or "imed out" in first else "ESYSTEM"
            raise PenstockError(status, self.lost(status, text)) from error

    # ---- the beat -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Post once a second where this rank is, by its page, for the others to read."""
        if self._others:
            where, look = weakref.WeakMethod(self._where), weakref.WeakMethod(self._look)
            self._beat = Beat(self._store, self.rank, where, look)

    def _where(self) -> tuple[int, str]:
        """Return how many places this rank has been at, and describe the present one."""
        return self.page.count, self.page.describe()

    def watch(self, runtime: _C.Runtime) -> None:
        """Look after the others at each beat at which this rank stands still: where it has a GPU.

        Parameters
        ----------
        runtime : Runtime
            What is stopped when another rank has failed. It is held weakly.
        """
        self._runtime = weakref.ref(runtime)

    def _look(self) -> None:
        """Do for a wait for the GPU, which is torch's, what the engine does for its own."""
        runtime = self._runtime()
        if runtime is None:
            return
        seconds, lane = self._standstill.look()
        is_called = time.monotonic() - self._called < _beat.INTERVAL
        if seconds == 0 or is_called or self._has_failed():
            return
        if lane is None:  # it computes, or does something else than to train
            failure = self._ask(self._find_failed) or ""
        else:
            launches, name = runtime.recent(), text_of(lane.name)
            own = [(name, text_of(lane.task), lane.ticket)] if lane.ticket else []
            own += [place for place in launches if place[0] == name and 0 < place[2] < lane.ticket]
            failure = self._check_others(seconds, own, launches)
        if failure:
            runtime.stop(failure)

    def stop(self) -> None:
        """Post no more."""
        if self._beat is not None:
            self._beat.stop()

    # ---- waiting --------------------------------------------------------------------------------

    def waits(self, seconds: float, lane: str, ticket: int, launches: list[Place]) -> str:
        """Check the other ranks from time to time; the engine calls it about every 50 ms of a wait.

        Parameters
        ----------
        seconds : float
            Since the wait began.
        lane, ticket
            Of what is waited for.
        launches : list of (str, str, int)
            Lane, task and ticket of the last launches, the latest of each lane first.

        Returns
        -------
        str
            Why to give up: another rank has failed. Empty: go on.
        """
        self._called = time.monotonic()
        own = [place for place in launches if place[0] == lane and 0 < place[2] <= ticket]
        return self._check_others(seconds, own, launches)

    def _check_others(self, seconds: float, own: list[Place], launches: list[Place]) -> str:
        """Check them, unless another thread does; `own`: what is waited for, what came before."""
        if not self._checking.acquire(blocking=False):
            return ""
        try:
            return self._check_now(seconds, own, launches)
        finally:
            self._checking.release()

    def _check_now(self, seconds: float, own: list[Place], launches: list[Place]) -> str:
        if seconds < self._looked:
            self._looked, self._is_logged, self._seen = 0.0, False, None
        self._place, self._before = [*own, None, None][:2]
        self._placed = time.monotonic()
        if not self._others or seconds - self._looked < min(1.0, self.timeout / 4):
            return ""
        self._looked = seconds
        failure = self._ask(self._report, {"tickets": _latest(launches)}) or ""
        if not failure and not self._is_logged:
            self._log_wait(seconds)
        return failure

    def _log_wait(self, seconds: float) -> None:
        """Log once that a wait is long, and look at the others some beats before."""
        limit = long_wait(self.timeout)
        if seconds >= limit:
            self._is_logged = True
            _logger.warning("%s", self._describe_wait(seconds))
        elif seconds >= limit - _SILENCE and self._seen is None:
            self._seen = self._inspect_others()

    def _describe_wait(self, seconds: float) -> str:
        what = ""
        if self._place is not None:
            lane, task, ticket = self._place
            what = f" for {task!r} (ticket {ticket})" if lane else f" for the {task}"
        return f"rank {self.rank} has waited {seconds:.0f} s{what}{self._describe_others()}"

    def _report(self, line: dict[str, Any]) -> str:
        """Leave a line, unless this rank has failed; return which rank has, and of what."""
        with self._writing:
            if line != self._line and not self._has_failed():
                self._store.set(f"rank/{self.rank}", json.dumps(line))
                self._line = line
        return self._find_failed()

    def _find_failed(self) -> str:
        if not self._store.check(["failed"]):
            return ""
        rank = int(self._store.get("failed"))
        self._knows = True
        return f"rank {rank} failed: {self._line_of(rank).get('failed', '')}"

    def _line_of(self, rank: int) -> dict[str, Any]:
        key = f"rank/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def _ask(self, function: Callable[..., Answer], *arguments: Any) -> Answer | None:
        """Call what uses the store; once it has not answered it is asked no more."""
        if self._is_mute:
            return None
        with suppress(RuntimeError, OSError, ValueError):
            call = _Aside(function, *arguments)
            if call.wait(_PATIENCE):
                return call.result()
        self._is_mute = True
        return None

    # ---- failing --------------------------------------------------------------------------------

    def lost(self, status: str, text: str) -> str:
        """Report to the others that this engine has failed; return the text with what is known.

        Parameters
        ----------
        status, text : str
            Of the failure.

        Returns
        -------
        str
            The text, and behind it which ranks are not where this one is.
        """
        if not self._others:
            return text
        is_theirs = status in _THEIRS
        if is_theirs and not self._knows:
            text += self._describe_others(_PATIENCE, until_one=status == "EPEER")
        self._ask(self._report_failure, text, is_theirs)
        return text

    def leave(self, why: str, *, is_theirs: bool) -> None:
        """Report to the other ranks what ends this process; not in a child of fork.

        What this engine has failed of before stays: the process ends because of that.
        """
        if os.getpid() == self._pid and self._others and not self._has_failed():
            self._ask(self._report_failure, why, is_theirs)

    def _has_failed(self) -> bool:
        return self._line is not None and "failed" in self._line

    def _report_failure(self, text: str, is_theirs: bool) -> bool:
        """Leave why this rank fails; `is_theirs`: because of another one."""
        place = "" if is_theirs or self._beat is None else f", {self.page.describe()}"
        with self._writing:
            self._line = {"failed": text[:600] + place, "is_theirs": is_theirs}
            self._store.set(f"rank/{self.rank}", json.dumps(self._line))
        if not self._store.check(["failed"]):
            self._store.set("failed", str(self.rank))
        return True

    def _describe_others(self, patience: float = 0.0, *, until_one: bool = False) -> str:
        """Say who is not where this rank is.

        Parameters
        ----------
        patience : float
            Seconds to wait for a rank to report that it has come.
        until_one : bool
            Whether one that is to blame is enough.
        """
        now = time.monotonic()
        until, is_placed = now + patience, now - self._placed < 2 * _beat.INTERVAL
        found = self._inspect_others()
        before = found if patience > 0 or self._seen is None else self._seen
        while found.missing and not (until_one and found.to_blame) and time.monotonic() < until:
            time.sleep(0.1)
            found = self._inspect_others()
        texts = list(found.to_blame)
        if found.missing and not (until_one and found.to_blame):
            texts += found.describe_missing(before)
        if texts and not until_one:
            texts += found.describe_waiting()
        texts = texts or found.victims
        if len(texts) > _MOST:
            texts[_MOST:] = [f"{len(texts) - _MOST} more"]
        if self._before is not None and is_placed:
            texts.append(f"all came to ticket {self._before[2]} ({self._before[1]!r}) before")
        if self._is_mute:
            texts.append("the store of torch.distributed does not answer")
        return "".join(f"; {text}" for text in texts)

    def _inspect_others(self) -> _Found:
        lines, posted = self._ask(self._read_lines) or ({}, {})
        self._read_pages(posted)
        found = _Found(posted=posted, waiting=[self.rank])
        for rank in self._others:
            line, state = lines.get(rank, {}), self._state_of(rank)
            if "failed" in line:
                texts = found.victims if line["is_theirs"] else found.to_blame
                texts.append(f"rank {rank} failed: {line['failed']}")
            elif state:
                text = f"the process of rank {rank} ({self._pids[rank]}) {state}"
                place = found.posted.get(rank)
                text = f"{text}, last heard of {place.place}" if place else text
                found.to_blame.append(text if self.compares else f"{text}{_NOT_COMPARED}")
            elif self._is_here(line.get("tickets", {})):
                found.waiting.append(rank)
            else:
                found.missing.append(rank)
        return found

    def _state_of(self, rank: int) -> str:
        return state_of(self._pids[rank]) if rank in self._pids else ""

    def _is_here(self, tickets: dict[str, int]) -> bool:
        """Whether a rank that has come to these tickets has come to where this one waits."""
        if self._place is None:
            return bool(tickets)
        lane, _, ticket = self._place
        return tickets.get(lane, 0) >= ticket

    def _read_lines(self) -> tuple[dict[int, dict[str, Any]], dict[int, Posted]]:
        posted = {rank: _beat.read(self._store, rank) for rank in range(self.size)}
        return (
            {rank: self._line_of(rank) for rank in self._others},
            {rank: place for rank, place in posted.items() if place is not None},
        )

    def _read_pages(self, posted: dict[int, Posted]) -> None:
        """Put what pages say in the place of what was posted up to a beat before."""
        for rank, page in self.pages.items():
            old, place = posted.get(rank, Posted(-1, "", 0.0)), _C.describe_page(page)
            posted[rank] = old if old.place == place else Posted(old.beat, place, 0.0)

    # ---- the log --------------------------------------------------------------------------------

    def log(self, level: int, is_raised: bool, text: str) -> None:
        """Forward a line of the library's log; one that is raised as well has the level DEBUG."""
        _logger.log(logging.DEBUG if is_raised else _LEVELS[level], "%s", text)


@dataclass
class _Found:
    """What is known of the other ranks, in words.

    Attributes
    ----------
    to_blame : list of str
        Those that have failed by themselves, have ended, or are stopped.
    missing : list of int
        Those that have not reported that they have come to where this rank is.
    waiting : list of int
        Those that are where this rank is, and itself.
    victims : list of str
        Those that have failed because of others.
    posted : dict
        What ranks have posted last.
    """

    to_blame: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    posted: dict[int, Posted] = field(default_factory=dict)

    def describe_missing(self, before: _Found) -> list[str]:
        """Say who is missing and where that is, or was when it was heard of last.

        Parameters
        ----------
        before : _Found
            What was known some beats ago, or this very thing.
        """
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in self.missing:
            places[self._place_of(rank, before.posted.get(rank))].append(rank)
        return [f"{_ranks(ranks)} did not come{place}" for place, ranks in places.items()]

    def _place_of(self, rank: int, before: Posted | None) -> str:
        posted = self.posted.get(rank)
        if posted is None:
            return ""
        if before is None or posted.beat == before.beat:
            return f": last heard of {posted.place}"
        return f": {posted.place} since {posted.seconds:.0f} s"

    def describe_waiting(self) -> list[str]:
        """Say where those wait that have come."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted(self.waiting):
            if rank in self.posted:
                places[self.posted[rank].place].append(rank)
        return [
            f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {place}"
            for place, ranks in places.items()
        ]


def _leave_all() -> None:
    """Write and report an exception that ends this process."""
    cause = getattr(sys, "last_value", None)
    if cause is None:
        return
    first = next(iter(str(cause).splitlines()), "")
    why = f"{type(cause).__name__}: {first}"
    is_theirs = isinstance(cause, PenstockError) and cause.status in _THEIRS
    if is_wanted():
        with suppress(PenstockError):  # the exception is told already
            dump_all(None, why, is_failure=True)
    for roll in list(_rolls):
        roll.leave(why, is_theirs=is_theirs)


class _Aside(Generic[Answer]):
    """A call on a thread of its own: it may block for ever, and signals are handled meanwhile."""

    def __init__(self, function: Callable[..., Answer], *arguments: Any) -> None:
        self._answer: Answer
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, args=(function, arguments), daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            text = f"the thread that waits for the other ranks could not be started: {error}"
            raise PenstockError("ESYSTEM", text) from None

    def _call(self, function: Callable[..., Answer], arguments: Any) -> None:
        try:
            self._answer = function(*arguments)
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> bool:
        """Wait for so long; return whether it is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Answer:
        """Return, or raise, what the call has; it is over."""
        if self._error is not None:
            raise self._error
        return self._answer


def _latest(launches: Iterable[Place]) -> dict[str, int]:
    """Return the ticket of each lane's last collective."""
    latest: dict[str, int] = {}
    for lane, _, ticket in launches:
        if ticket > 0:
            latest.setdefault(lane, ticket)
    return latest


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST])) + (" ..." if len(ranks) > _MOST else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def long_wait(timeout: float) -> float:
    """Return the seconds after which a wait is logged.

    That is a tenth of the deadline, 30 s at most, and, where there is so much, not less than it
    takes to tell a beat that has ended from one that is to come.
    """
    return min(30.0, timeout / 2, max(timeout / 10, 2 * _SILENCE))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _this_host() -> str:
    """Return an identifier of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()} {text}".encode()).hexdigest()


def _namespace() -> str:
    """Return an identifier of the PID namespace."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return "-"
