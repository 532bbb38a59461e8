"""`trace`: record what a sharded model's lanes do, as a Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from penstock._arguments import check_model, refuse
from penstock._engine import engine_of
from penstock._errors import PenstockError

PathLike = str | os.PathLike[str]


@contextmanager
def trace(model: nn.Module | PathLike | None = None, path: PathLike | None = None) -> Iterator[str]:
    """Record what happens inside, and write it as a Chrome trace that Perfetto opens.

    Each rank writes a file of its own; ``penstock.trace.merge`` makes one of them.

    Parameters
    ----------
    model : nn.Module, optional
        The sharded model; may be left out (``trace(path)``) while only one lives.
    path : str or path
        The file; ``{rank}`` in it becomes the rank, and has to be there where there are several. It
        is also written when what is recorded fails.

    Yields
    ------
    str
        The path of this rank's file.

    Raises
    ------
    PenstockError
        Before anything is recorded: EINVAL without a path of this rank's own, EIO where the file
        cannot be written.
    """
    if isinstance(model, (str, os.PathLike)):
        model, path = None, model
    if model is not None:
        check_model(model)
    if path is None:
        raise PenstockError("EINVAL", "trace: say which file to write: trace(model, path)")
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, "give the file to write, a str or a path")
    engine = engine_of(model)

    def finish() -> None:
        if engine.world.device.type == "cuda":
            torch.cuda.synchronize(engine.world.device)  # what is in flight belongs to it
            engine.native.stats()  # reads what was timed

    own = own_path(path, engine.world.rank, engine.world.size)
    with recorded(engine.runtime, own, finish):
        engine.is_traced = True
        try:
            yield own
        finally:
            engine.is_traced = False


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
        with open(own, "ab"):
            pass
    except (OSError, ValueError) as error:
        raise PenstockError("EIO", f"trace: {own!r} cannot be written: {error}") from None
    return own


@contextmanager
def recorded(source: Any, own: str, finish: Callable[[], None]) -> Iterator[str]:
    """Record what a source of traces does, up to the end of `finish`, and write it to `own`."""

    def end() -> None:
        try:
            finish()
        finally:
            source.trace_stop()
            source.trace_write(own)

    source.trace_start()
    try:
        yield own
    except BaseException:
        with suppress(Exception):  # the first error is the one to be raised
            end()
        raise
    end()
