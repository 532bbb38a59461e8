"""`trace`: record what a sharded model's lanes do, as a Chrome trace."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from penstock._arguments import check_model, refuse
from penstock._engine import Engine, engine_of
from penstock._errors import PenstockError

PathLike = str | os.PathLike[str]
_logger = logging.getLogger("penstock")


class Recording(os.PathLike[str]):
    """A trace that can be started and stopped; also the path of its file.

    Parameters
    ----------
    source : Runtime or module
        What records.
    path : str
        The file.
    finish : callable
        Called before a recording ends: what is in flight belongs to it.
    max_bytes : int, optional
        Of a file, about.

    Attributes
    ----------
    path : str
        The file that is written next, or was written last once all are.
    """

    def __init__(
        self, source: Any, path: str, finish: Callable[[], None], max_bytes: int | None
    ) -> None:
        self.path = path
        self._first = path
        self._source = source
        self._finish = finish
        self._max_bytes = 0 if max_bytes is None else max_bytes
        self._is_on = False
        self.files = 0

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    @property
    def is_on(self) -> bool:
        """Whether it records now."""
        return self._is_on

    def start(self) -> None:
        """Begin to record: what was recorded before is in the file that `stop` has written.

        Raises
        ------
        PenstockError
            ESTATE while it, or another trace of the same model, records.
        """
        self._source.trace_start()
        self._is_on = True
        if self.files:
            self.path = _numbered(self._first, self.files + 1)

    def stop(self) -> str:
        """End the recording and write it.

        Returns
        -------
        str
            The file; that of a second recording has ``.2`` in its name, and so on.

        Raises
        ------
        PenstockError
            ESTATE while nothing is recorded, EIO where the file cannot be written.
        """
        try:
            if self._is_on:
                self._finish()
        finally:
            self._is_on = False
            self._source.trace_stop()
            _write(self._source, self.path, self._max_bytes)
            self.files += 1
        return self.path


def _numbered(path: str, number: int) -> str:
    root, extension = os.path.splitext(path)
    if extension == ".gz":
        root, inner = os.path.splitext(root)
        extension = inner + extension
    return f"{root}.{number}{extension}"


def _write(source: Any, path: str, max_bytes: int) -> None:
    if not path.endswith(".gz"):
        source.trace_write(path, max_bytes)
        return
    plain = path + ".part"
    try:
        source.trace_write(plain, max_bytes)
        with open(plain, "rb") as whole, gzip.open(path, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(whole, compressed, 1 << 20)
    except OSError as error:
        raise PenstockError("EIO", f"trace: {path!r} cannot be written: {error}") from None
    finally:
        with suppress(OSError):
            os.unlink(plain)


@contextmanager
def trace(
    model: nn.Module | PathLike | None = None,
    path: PathLike | None = None,
    *,
    steps: Collection[int] | None = None,
    max_bytes: int | None = None,
) -> Iterator[Recording]:
    """Record what happens inside, and write it as a Chrome trace that Perfetto opens.

    Each rank writes a file of its own; ``penstock.trace.merge`` makes one of them. Beside lanes and
    waits it has the slices ``step``, ``forward``, ``backward`` and ``optimizer``, and the blocks'
    parts of forward and backward. A step lasts from a forward that trains to the end of the
    optimizers' steps behind it. On GPUs these are the times of the thread that launches.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out (``trace(path)``) while only one lives.
    path : str or path
        The file; ``{rank}`` in it becomes the rank, and has to be there where there are several:
        those along other axes of a mesh count on. It is also written when what is recorded fails.
        One that ends in ``.gz`` is compressed.
    steps : collection of int, optional
        Which steps to record, such as ``range(10, 15)``: those that begin inside count from 0. Each
        run of consecutive steps makes a file, which is written once optimizers have stepped all
        parameters in the last of them, else when the next one begins. Left out: all from the begin
        to the end; ``()``: what is between calls of ``start()`` and ``stop()``.
    max_bytes : int, optional
        About how large the file (before it is compressed) may become: the oldest records are
        dropped, which the file and the report say. Left out: only each lane's and thread's memory
        is limited, to 65,536 records.

    Yields
    ------
    Recording
        Its methods ``start()`` and ``stop()`` record a part of what happens inside; ``path``, which
        the object also stands for, is this rank's file.

    Raises
    ------
    PenstockError
        Before anything is recorded: EINVAL without a path of this rank's own, EIO where the file
        cannot be written, ESTATE while another trace of the model records.
    """
    if isinstance(model, (str, os.PathLike)):
        model, path = None, model
    if model is not None:
        check_model(model)
    if path is None:
        raise PenstockError("EINVAL", "trace: say which file to write: trace(model, path)")
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, "give the file to write, a str or a path")
    _check(steps, max_bytes)
    engine = engine_of(model)
    own = own_path(path, *engine.world.among_all)
    recording = Recording(engine.runtime, own, lambda: _finish(engine), max_bytes)
    with _following(engine, recording, steps), recorded(recording, is_now=steps is None):
        yield recording
    if steps and not recording.files:
        _logger.warning("trace: none of the steps %s began: nothing was written", steps)


def _check(steps: object, max_bytes: object) -> None:
    if steps is not None and not isinstance(steps, Collection):
        refuse("steps", steps, "give the numbers of steps, such as range(10, 15)")
    is_size = isinstance(max_bytes, int) and not isinstance(max_bytes, bool) and max_bytes > 0
    if max_bytes is not None and not is_size:
        refuse("max_bytes", max_bytes, "give a number of bytes above 0")


def _finish(engine: Engine) -> None:
    engine.phases.end_step()
    if engine.world.device.type == "cuda":
        torch.cuda.synchronize(engine.world.device)
        if engine.native.is_steady():
            with suppress(PenstockError):  # of a job that has failed, which says so elsewhere
                engine.native.drain()  # lanes note an end a little behind the device
        engine.native.stats()  # reads what was timed


@contextmanager
def _following(
    engine: Engine, recording: Recording, steps: Collection[int] | None
) -> Iterator[None]:
    """Have the engine tell the trace of its phases, and the recording start and stop by steps."""
    phases = engine.phases
    if phases.is_on:
        raise PenstockError(
            "ESTATE", f"trace: {engine.name} is recording already: end that trace first"
        )

    def steer(number: int, begins: bool) -> None:
        if steps is None:
            return
        if begins and number in steps and not recording.is_on:
            recording.start()
        elif number - 1 in steps and number not in steps and recording.is_on:
            recording.stop()

    phases.start(engine.runtime, steer)
    try:
        yield
    finally:
        phases.stop()


def own_path(path: PathLike, rank: int, size: int) -> str:
    """Return the path of a rank's trace, once it is sure that it can be written."""
    given = os.fspath(path)
    if size > 1 and "{rank}" not in given:
        root, extension = os.path.splitext(given)
        raise PenstockError(
            "EINVAL",
            f"trace: {size} ranks would write over each other's {given!r}: put {{rank}} in its "
            f"name, as in {root + '{rank}' + extension!r}",
        )
    own = given.replace("{rank}", str(rank))
    try:
        is_new = not os.path.lexists(own)
        with open(own, "ab"):
            pass
        if is_new:
            os.unlink(own)
    except (OSError, ValueError) as error:
        raise PenstockError("EIO", f"trace: {own!r} cannot be written: {error}") from None
    return own


@contextmanager
def recorded(recording: Recording, *, is_now: bool = True) -> Iterator[Recording]:
    """Start a recording, if it is to start now, and stop it behind what happens inside."""
    if is_now:
        recording.start()
    try:
        yield recording
    except BaseException:
        with suppress(Exception):  # the first error is the one to be raised
            if recording.is_on:
                recording.stop()
        raise
    if recording.is_on:
        recording.stop()
